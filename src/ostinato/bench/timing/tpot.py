"""Derives a time per output token from short and long generations, or rejects it as noise.

If the spread of the times exceeds their difference, the cell is unusable and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = list[list[int]]  # the tokens of each request


@dataclass(kw_only=True)
class Record:
    """Measurements of one subject at one batch size. All subjects get the same prompts."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    tokens: Rows = field(default_factory=list)  # of all runs, including the warm-up


@dataclass(frozen=True, kw_only=True)
class Tpot:
    """Seconds per output token; ``unusable`` says why they are meaningless, if they are."""

    median: float
    quartiles: tuple[float, float]
    unusable: str | None = None


def time_per_token(short_s: Sequence[float], long_s: Sequence[float], new_tokens: int) -> Tpot:
    """Time per token from paired runs, the long one making ``new_tokens`` more per sequence.

    Unusable if the middle half of either kind of run spreads over more time than lies between
    them, or if the time would not be positive in the middle half of the pairs. A single pair has no
    spread: only its sign is checked.
    """
    times = [(long - short) / new_tokens for short, long in zip(short_s, long_s, strict=True)]
    low, high = _quartiles(times)
    between = statistics.median(long_s) - statistics.median(short_s)
    unusable = None
    if low <= 0 or between <= max(_spread(short_s), _spread(long_s)):
        unusable = (
            f"noise: short runs took {_range(short_s)} and long runs {_range(long_s)} (quartiles), "
            f"with {between * 1e3:.3f} ms between their medians; measure on a quieter machine, or "
            "with more --repeats and --new-tokens"
        )
    return Tpot(median=statistics.median(times), quartiles=(low, high), unusable=unusable)


def agreement(ours: Rows, theirs: Rows) -> dict[str, int]:
    """How much of two subjects' answers agrees, over all tokens of all requests.

    Tokens count up to the first difference, since everything after it has another context.
    """
    same = [_num_same(a, b) for a, b in zip(ours, theirs, strict=True)]
    longest = [max(len(a), len(b)) for a, b in zip(ours, theirs, strict=True)]
    return {
        "requests": sum(count == length for count, length in zip(same, longest, strict=True)),
        "of_requests": len(ours),
        "tokens": sum(same),
        "of_tokens": sum(longest),
    }


def evaluate(
    records: dict[str, Record], *, ours: str, batch: int, new_tokens: int
) -> dict[str, Any]:
    """A row of the results. An unusable cell has no times, only its reason."""
    all_times = {
        name: time_per_token(record.short_s, record.long_s, new_tokens)
        for name, record in records.items()
    }
    times = {name: time for name, time in all_times.items() if time.unusable is None}
    others = [name for name in records if name != ours]
    agreements = {name: agreement(records[ours].tokens, records[name].tokens) for name in others}
    return {
        "batch": batch,
        "tpot_ms": {name: time.median * 1e3 for name, time in times.items()},
        "tpot_quartiles_ms": {
            name: [quartile * 1e3 for quartile in time.quartiles] for name, time in times.items()
        },
        "tokens_per_s": {name: batch / time.median for name, time in times.items()},
        "speedup_over": {
            name: times[name].median / times[ours].median
            for name in others
            if name in times and ours in times
        },
        "same_tokens_as": {
            name: count["tokens"] == count["of_tokens"] for name, count in agreements.items()
        },
        "agreement": agreements,
        "unusable": {
            name: time.unusable for name, time in all_times.items() if time.unusable is not None
        },
        "seconds": {
            name: {"short": record.short_s, "long": record.long_s}
            for name, record in records.items()
        },
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _spread(values: Sequence[float]) -> float:
    low, high = _quartiles(values)
    return high - low


def _range(values: Sequence[float]) -> str:
    low, high = _quartiles(values)
    return f"{low * 1e3:.3f} to {high * 1e3:.3f} ms"


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    differs = (number for number, (a, b) in pairs if a != b)
    return next(differs, min(len(ours), len(theirs)))
