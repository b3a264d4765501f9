"""``ostinato bench throughput``: the requests it draws, and what it reports about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.bench import plot, throughput
from ostinato.bench.mixes import MIXES, TimedRequest, choose_mixes, draw_requests
from ostinato.bench.throughput import Served, serve, summarize
from ostinato.config import EngineConfig, GraphConfig
from ostinato.errors import ConfigError

CONFIG = EngineConfig(
    "tiny",
    random_weights=True,
    device="cpu",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    graphs=GraphConfig(capture_sizes=[1, 2, 4, 16]),
    show_progress=False,
)
SMALL: dict[str, Any] = {"num_requests": 6, "scale": 0.02}
EVERY_MIX = list(MIXES)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_config(CONFIG) as llm:
        yield llm


def small_requests(name: str, **options: Any) -> list[TimedRequest]:
    (mix,) = choose_mixes([name], **SMALL)
    return draw_requests(mix, **{"vocab_size": 512, "seed": 0, **options})


# --- the requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_requests", "prompt_lens", "output_lens"),
    [
        ("chat", 400, (32, 1024), (32, 384)),
        ("long-in-short-out", 100, (2048, 8192), (16, 64)),
        ("short-in-long-out", 256, (16, 128), (256, 1024)),
        ("shared-prefix", 256, (1024 + 32, 1024 + 256), (32, 128)),
        ("prompts", 32, (2048, 2048), (1, 1)),
    ],
)
def test_lengths_of_a_mix(
    name: str, num_requests: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int]
) -> None:
    (mix,) = choose_mixes([name])
    requests = draw_requests(mix, vocab_size=512, seed=0)
    assert len(requests) == num_requests
    prompts = [len(each.prompt_token_ids) for each in requests]
    outputs = [each.output_len for each in requests]
    for lengths, (low, high) in ((prompts, prompt_lens), (outputs, output_lens)):
        assert low <= min(lengths) <= max(lengths) <= high
        slack = (high - low) // 5  # uniform draws come close to both ends
        assert min(lengths) <= low + slack
        assert max(lengths) >= high - slack
    assert mix.longest == prompt_lens[1] + output_lens[1]
    assert {token for each in requests for token in each.prompt_token_ids} <= set(range(512))


def test_groups_share_a_prefix_and_nothing_else() -> None:
    (mix,) = choose_mixes(["shared-prefix"], num_requests=40)
    requests = draw_requests(mix, vocab_size=10**6, seed=0)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for each in requests:
        prefix, rest = each.prompt_token_ids[:1024], each.prompt_token_ids[1024:]
        groups.setdefault(tuple(prefix), []).append(rest)
    assert sorted(len(group) for group in groups.values()) == [8, 16, 16]
    first = [each.prompt_token_ids[1024] for each in requests]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("arrival", [{}, {"arrival": "poisson", "rate": 20.0}], ids=str)
@pytest.mark.parametrize("name", EVERY_MIX)
def test_a_seed_gives_the_same_requests(name: str, arrival: dict[str, Any]) -> None:
    requests = small_requests(name, seed=3, **arrival)
    assert requests == small_requests(name, seed=3, **arrival)
    assert requests != small_requests(name, seed=4, **arrival)
    at_once = [replace(each, arrival_s=0.0) for each in requests]
    assert at_once == small_requests(name, seed=3)


def test_poisson_arrivals() -> None:
    (mix,) = choose_mixes(["chat"], num_requests=4000, scale=0.01)
    requests = draw_requests(mix, vocab_size=8, seed=0, arrival="poisson", rate=20.0)
    times = [each.arrival_s for each in requests]
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    # The mean and the standard deviation of an exponential distribution are equal.
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)
    others = draw_requests(mix, vocab_size=8, seed=1, arrival="poisson", rate=20.0)
    assert times[1:] != [each.arrival_s for each in others][1:]


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrival", [{}, {"arrival": "poisson", "rate": 500.0}], ids=str)
def test_served_requests_have_all_their_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, arrival: dict[str, Any]
) -> None:
    monkeypatch.setattr(llm.engine, "eos_token_ids", frozenset(range(512)))  # ends nothing
    requests = small_requests("chat", **arrival)
    all_served = serve(llm.engine, requests)
    params = [
        SamplingParams(temperature=0, max_tokens=each.output_len, ignore_eos=True)
        for each in requests
    ]
    expected = llm.generate([each.prompt_token_ids for each in requests], params)
    assert not llm.engine.has_unfinished
    for request, served, output in zip(requests, all_served, expected, strict=True):
        assert served.token_ids == output.outputs[0].token_ids
        assert len(served.token_times_s) == len(served.token_ids) == request.output_len
        assert served.arrival_s == request.arrival_s
        assert served.ttft_s > 0
        assert all(gap > 0 for gap in served.gaps_s)  # one token per step


def test_requests_wait_until_they_are_due(llm: LLM) -> None:
    """Also when nothing runs in between."""
    first, second = small_requests("prompts")[:2]
    early, delayed = serve(llm.engine, [first, replace(second, arrival_s=0.2)])
    assert early.token_times_s[-1] < delayed.token_times_s[0]
    assert delayed.token_times_s[0] > 0.2
    assert delayed.ttft_s == delayed.token_times_s[0] - 0.2


def test_summary() -> None:
    """With values computed by hand and by NumPy."""
    random = np.random.default_rng(0)
    all_served = [
        Served(
            arrival_s=0.5 * number,
            prompt_len=10 + number,
            token_ids=[7] * 5,
            token_times_s=(0.5 * number + random.random(5).cumsum()).tolist(),
            num_preemptions=number % 2,
            num_cached_tokens=3,
        )
        for number in range(37)
    ]
    summary = summarize(all_served)
    times = np.array([each.token_times_s for each in all_served])
    assert summary["num_requests"] == 37
    assert summary["duration_s"] == times.max()
    assert summary["prompt_tokens"] == sum(range(10, 47))
    assert summary["output_tokens"] == 37 * 5
    assert summary["output_tokens_per_s"] == pytest.approx(185 / times.max())
    assert summary["tokens_per_s"] == pytest.approx((185 + 1036) / times.max())
    assert summary["requests_per_s"] == pytest.approx(37 / times.max())
    first = (times[:, 0] - 0.5 * np.arange(37)) * 1e3
    per_token = (times[:, -1] - times[:, 0]) / 4 * 1e3
    for name, values in (("ttft_ms", first), ("tpot_ms", per_token)):
        for percent in (50, 90, 99):
            expected = np.percentile(values, percent, method="inverted_cdf")
            assert summary[name][f"p{percent}"] == pytest.approx(expected)
    assert summary["longest_gap_ms"] == pytest.approx(np.diff(times).max() * 1e3)
    assert summary["preemptions"] == 18
    assert summary["prefix_hit_tokens"] == 37 * 3


# --- the plot -------------------------------------------------------------------------------------


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "llama-3.1-8b",
        "dtype": "bfloat16",
        "random_weights": True,
        "machine": {"gpu": "NVIDIA H200", "cpu": "", "torch": "2.11.0", "date": "2026-11-16"},
        "rows": list(rows),
    }


def test_plot() -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw_throughput(
        result(
            {"mix": "chat", "output_tokens_per_s": 800.0, "tokens_per_s": 3000.0},
            {"mix": "prompts", "output_tokens_per_s": 20.0, "tokens_per_s": 41000.0},
        )
    )
    (axes,) = figure.axes
    bars = {each.get_label(): [bar.get_width() for bar in each] for each in axes.containers}
    assert bars == {"output tokens/s": [800, 20], "prompt and output tokens/s": [3000, 41000]}
    assert [each.get_text() for each in axes.get_yticklabels()] == ["chat", "prompts"]
    assert {"800", "20", "3,000", "41,000"} <= {each.get_text() for each in axes.texts}
    assert "llama-3.1-8b" in axes.get_title(loc="left")


def test_plot_chooses_by_the_kind_of_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "result.json", tmp_path / "picture.svg"
    row = {"mix": "chat", "output_tokens_per_s": 800.0, "tokens_per_s": 3000.0}
    path.write_text(json.dumps(result(row)), encoding="utf-8")
    plot.draw_file(path, picture)
    assert picture.stat().st_size


def test_plot_of_servers() -> None:
    pytest.importorskip("matplotlib")
    row = {"server": "transformers", "output_tokens_per_s": 800.0, "tokens_per_s": 3000.0}
    (axes,) = plot.draw_throughput(result(row)).axes
    assert [each.get_text() for each in axes.get_yticklabels()] == ["transformers"]


# --- the benchmark --------------------------------------------------------------------------------


@pytest.mark.parametrize("arrival", [{}, {"arrival": "poisson", "rate": 500.0}], ids=str)
def test_the_numbers_of_every_mix_add_up(arrival: dict[str, Any]) -> None:
    results = throughput.run(CONFIG, mixes=EVERY_MIX, repeats=2, **SMALL, **arrival)
    assert [row["mix"] for row in results["rows"]] == EVERY_MIX
    for row in results["rows"]:
        requests = small_requests(row["mix"], **arrival)
        assert row["num_requests"] == 6
        assert row["output_tokens"] == sum(each.output_len for each in requests)
        assert row["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in requests)
        seconds = row["duration_s"]
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / seconds)
        assert len(row["durations_s"]) == 2
        assert seconds == max(row["durations_s"])  # the slower of two
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= seconds * 1e3
        if any(each.output_len > 1 for each in requests):
            assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["p99"] <= row["longest_gap_ms"]
        else:
            assert row["tpot_ms"] is row["longest_gap_ms"] is None
        # A step samples for at most 4 requests.
        assert sum(row["steps"].values()) >= row["output_tokens"] / 4
        assert row["steps"]["eager"] == sum(row["eager_reasons"].values())
        assert 0 <= row["padding_fraction"] < 1
        assert row["preemptions"] == 0


def test_steps_are_counted_by_mode_and_reason() -> None:
    run: dict[str, Any] = {"num_requests": 4, "scale": 0.01, "repeats": 1}
    results = throughput.run(CONFIG, mixes=["prompts", "short-in-long-out"], **run)
    assert results["mode"] == "FULL_AND_PIECEWISE"
    prompts, decodes = results["rows"]
    # Four prompts of 20 tokens fill a step of 64 and leave 16.
    assert prompts["steps"] == {"FULL": 0, "PIECEWISE": 1, "eager": 1}
    assert prompts["eager_reasons"] == {"TOO_LARGE": 1}
    assert prompts["padding_tokens"] == 0
    assert decodes["steps"]["FULL"] >= 2
    eager = throughput.run(replace(CONFIG, enforce_eager=True), mixes=["prompts"], **run)
    assert eager["rows"][0]["steps"] == {"FULL": 0, "PIECEWISE": 0, "eager": 2}
    assert eager["rows"][0]["eager_reasons"] == {"MODE_NONE": 2}


@pytest.mark.slow
def test_prefixes_are_found_within_a_run_and_not_across_runs() -> None:
    config = replace(CONFIG, block_size=4, enforce_eager=True)
    prefix_len = 48  # twelve blocks
    options: dict[str, Any] = {"num_requests": 16, "scale": prefix_len / 1024, "repeats": 2}
    results = throughput.run(config, mixes=["shared-prefix", "chat"], **options)
    shared, chat = (row["prefix_hit_tokens"] for row in results["rows"])
    assert prefix_len <= shared <= 15 * prefix_len
    assert shared % prefix_len == 0
    assert chat == 0


def test_preemptions_are_counted() -> None:
    # Room for 128 tokens: layers, keys and values, heads, width, float32; and the reserved block.
    num_bytes = (128 + 16) * 2 * 2 * 2 * 16 * 4
    limits: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": num_bytes}
    config = replace(CONFIG, enforce_eager=True, **limits)
    options: dict[str, Any] = {"num_requests": 4, "scale": 0.1, "repeats": 1}
    (row,) = throughput.run(config, mixes=["short-in-long-out"], **options)["rows"]
    assert row["prompt_tokens"] + row["output_tokens"] > 128
    assert row["preemptions"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixes": ["chat", "chats"]}, r"unknown mixes \['chats'\]; choose from chat, long-in"),
        ({"mixes": []}, "no mix to measure; choose from chat"),
        ({"num_requests": 0}, "num_requests must be a positive integer, got 0"),
        ({"repeats": 0}, "repeats must be a positive integer, got 0"),
        ({"scale": 0.0}, r"scale must be a positive number, got 0\.0"),
        ({"scale": 1e306}, r"scale must be at most 1,000,000, got 1e\+306"),
        ({"arrival": "burst"}, "unknown arrival 'burst'; choose from all, poisson"),
        ({"arrival": "poisson"}, "arrival 'poisson' needs a rate; give --rate"),
        ({"arrival": "poisson", "rate": 0.0}, r"rate must be a positive number, got 0\.0"),
        ({"arrival": "poisson", "rate": -1.0}, r"rate must be a positive number, got -1\.0"),
        ({"arrival": "poisson", "rate": float("nan")}, "rate must be a positive number, got nan"),
        ({"rate": 5.0}, "rate 5 has no effect on arrival 'all'"),
        (
            {"mixes": ["prompts", "chat"]},
            r"the mix 'prompts' has sequences of up to 2049 tokens, but the engine takes at most "
            r"256 \(max_model_len\); raise it",
        ),
    ],
    ids=str,
)
def test_bad_options(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def build(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(LLM, "from_config", build)
    with pytest.raises(ConfigError, match=message):
        throughput.run(CONFIG, **{"mixes": ["chat"], **options})


def test_the_limit_of_the_model_counts_too() -> None:
    with pytest.raises(ConfigError, match=r"up to 8256 tokens, .* at most 2048 \(max_model_len\)"):
        throughput.run(replace(CONFIG, max_model_len=None), mixes=["long-in-short-out"])
