"""``Answer``: when the tokens of one request came; and what many of them amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.bench.mixes import check_positive_number
from ostinato.serving.percentiles import percentiles


@dataclass(kw_only=True)
class Answer:
    """One request and what came of it. Times are seconds after the start of the run.

    ``arrival_s``: when it was due, so a client that is late counts against the server.
    ``failure``: why there is no whole answer: the first line of an error, or ``"time is up"``.
    """

    arrival_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    longest_gap_s: float = 0.0
    failure: str | None = None

    def note(self, now_s: float) -> None:
        """Some tokens have come."""
        if self.first_s is None or self.last_s is None:
            self.first_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s

    @property
    def is_whole(self) -> bool:
        return self.failure is None and self.first_s is not None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None, "a token has come"
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None if there is none."""
        if self.output_tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a good answer keeps to, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft-limit", self.ttft_ms), ("tpot-limit", self.tpot_ms)):
            if value is not None:
                check_positive_number(name, value)

    def are_kept(self, answer: Answer) -> bool:
        tpot_s = answer.tpot_s or 0.0
        return (
            answer.is_whole
            and (self.ttft_ms is None or answer.ttft_s * 1e3 <= self.ttft_ms)
            and (self.tpot_ms is None or tpot_s * 1e3 <= self.tpot_ms)
        )


def summarize(answers: Sequence[Answer], limits: Limits) -> dict[str, Any]:
    """Throughput, latency and goodput of a run.

    Throughput counts all tokens that came, up to the last. Latencies are those of whole answers.
    """
    whole = [each for each in answers if each.is_whole]
    seconds = max((each.last_s for each in answers if each.last_s is not None), default=0.0)
    prompt_tokens = sum(each.prompt_tokens for each in answers if each.first_s is not None)
    output_tokens = sum(each.output_tokens for each in answers)
    good = sum(map(limits.are_kept, answers))
    tpots = [each.tpot_s * 1e3 for each in whole if each.tpot_s is not None]
    gaps = [each.longest_gap_s * 1e3 for each in whole if each.longest_gap_s]

    def per_second(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "num_requests": len(answers),
        "whole": len(whole),
        "failures": dict(Counter(each.failure for each in answers if each.failure is not None)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "duration_s": seconds,
        "output_tokens_per_s": per_second(output_tokens),
        "tokens_per_s": per_second(prompt_tokens + output_tokens),
        "requests_per_s": per_second(len(whole)),
        "ttft_ms": percentiles([each.ttft_s * 1e3 for each in whole]),
        "tpot_ms": percentiles(tpots),
        "longest_gap_ms": max(gaps, default=None),
        "good": good,
        "goodput_requests_per_s": per_second(good),
    }
