"""What ``ostinato bench serve`` computes from its answers."""

from __future__ import annotations

import pytest

from ostinato.bench.serving.answer import Answer, Limits, summarize
from ostinato.errors import ConfigError


def answer(arrival_s: float, times_s: list[float], output_tokens: int | None = None) -> Answer:
    whole = Answer(arrival_s=arrival_s, prompt_tokens=10)
    for time_s in times_s:
        whole.note(time_s)
    whole.output_tokens = len(times_s) if output_tokens is None else output_tokens
    return whole


def test_the_times_of_an_answer() -> None:
    late = answer(1.0, [1.25, 1.5, 2.25, 2.5])
    assert late.ttft_s == 0.25  # from when it was due
    assert late.tpot_s == pytest.approx(1.25 / 3)
    assert late.longest_gap_s == 0.75
    assert answer(0, [1, 3], output_tokens=5).tpot_s == 0.5  # events may have several tokens
    assert answer(0, [1]).tpot_s is None


def test_summary() -> None:
    cut = answer(0.5, [1.0, 2.0])
    cut.failure = "time is up"
    refused = Answer(arrival_s=1.0, failure="HTTP 429")
    rows = [answer(0.0, [0.5, 1.0, 1.5]), answer(1.0, [3.0, 4.0]), cut, refused]
    summary = summarize(rows, Limits(ttft_ms=1000))
    assert summary["num_requests"] == 4
    assert summary["whole"] == 2
    assert summary["failures"] == {"time is up": 1, "HTTP 429": 1}
    assert summary["duration_s"] == 4
    assert summary["output_tokens"] == 7
    assert summary["output_tokens_per_s"] == 7 / 4
    assert summary["tokens_per_s"] == (7 + 30) / 4
    assert summary["ttft_ms"] == {"p50": 500, "p90": 2000, "p99": 2000}
    assert summary["tpot_ms"] == {"p50": 500, "p90": 1000, "p99": 1000}
    assert summary["longest_gap_ms"] == 1000
    assert summary["good"] == 1
    assert summary["goodput_requests_per_s"] == 1 / 4


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, 2),
        ({"ttft_ms": 499}, 0),
        ({"ttft_ms": 500}, 1),
        ({"tpot_ms": 500}, 1),
        ({"ttft_ms": 2000, "tpot_ms": 999}, 1),
        ({"ttft_ms": 2000, "tpot_ms": 1000}, 2),
    ],
)
def test_goodput_needs_every_limit(limits: dict[str, float], good: int) -> None:
    rows = [answer(0.0, [0.5, 1.0, 1.5]), answer(1.0, [3.0, 4.0])]
    assert summarize(rows, Limits(**limits))["good"] == good


def test_a_run_without_any_token() -> None:
    summary = summarize([Answer(arrival_s=0, failure="refused")], Limits())
    assert summary["output_tokens_per_s"] == summary["goodput_requests_per_s"] == 0
    assert summary["ttft_ms"] is summary["tpot_ms"] is summary["longest_gap_ms"] is None


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limits_are_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="ttft-limit must be a positive number"):
        Limits(ttft_ms=value)
