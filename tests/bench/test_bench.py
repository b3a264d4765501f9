"""What the benchmarks compute from their measurements. No timings are checked."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import ostinato
from ostinato import LLM
from ostinato.attention.base import AttentionSpec
from ostinato.bench import plot
from ostinato.bench.core import run as core
from ostinato.bench.timing import baselines, floor, profile
from ostinato.bench.timing.breakdown import (
    ATTENTION,
    COPIES,
    GAPS,
    GEMM,
    KERNELS,
    SMALL,
    Interval,
    break_down,
    part_of,
)
from ostinato.bench.timing.tpot import Record, agreement, evaluate, time_per_token
from ostinato.errors import ConfigError, MeasurementError

# --- the time per output token --------------------------------------------------------------------


def test_time_per_token() -> None:
    time = time_per_token([0.010, 0.012, 0.011], [0.110, 0.111, 0.113], new_tokens=100)
    assert time.median == pytest.approx(1e-3)
    assert time.quartiles == (pytest.approx(0.995e-3), pytest.approx(1.01e-3))
    assert time.unusable is None
    assert time_per_token([0.010], [0.110], new_tokens=100).quartiles == (
        pytest.approx(1e-3),
        pytest.approx(1e-3),
    )


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ([0.3], [0.2]),  # negative
        ([0.2], [0.2]),  # nothing at all
        ([0.1, 0.3, 0.5], [0.4, 0.4, 0.4]),  # the short runs spread over more than the difference
        ([0.1, 0.1, 0.1], [0.15, 0.2, 0.6]),  # the long ones
        ([0.1, 0.18, 0.18, 0.18], [0.19, 0.1, 0.17, 0.2]),  # medians are fine, pairs are not
    ],
)
def test_a_time_that_noise_exceeds_is_unusable(short: list[float], long: list[float]) -> None:
    reason = time_per_token(short, long, new_tokens=10).unusable
    assert reason is not None
    assert re.match(
        r"noise: short runs took [0-9.]+ to [0-9.]+ ms and long runs [0-9.]+ to [0-9.]+ ms "
        r"\(quartiles\), with -?[0-9.]+ ms between their medians; measure on a quieter machine",
        reason,
    )


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)), min_size=1, max_size=12),
    st.integers(1, 500),
)
def test_no_time_is_negative(pairs: list[tuple[float, float]], new_tokens: int) -> None:
    short, long = zip(*pairs, strict=True)
    record = Record(short_s=list(short), long_s=list(long))
    row = evaluate({"ostinato": record}, ours="ostinato", batch=2, new_tokens=new_tokens)
    (reason,) = row["unusable"].values() or (None,)
    for name in ("tpot_ms", "tokens_per_s", "tpot_quartiles_ms"):
        assert (list(row[name]) == ["ostinato"]) == (reason is None)
    if reason is None:
        low, high = row["tpot_quartiles_ms"]["ostinato"]
        assert 0 < low <= row["tpot_ms"]["ostinato"] <= high
        assert row["tokens_per_s"]["ostinato"] > 0


def test_one_outlier_does_not_spoil_many_runs() -> None:
    time = time_per_token([0.1] * 9 + [5.0], [0.2] * 9 + [0.3], new_tokens=10)
    assert time.median == pytest.approx(0.01)
    assert time.unusable is None


def test_all_tokens_of_all_requests_are_compared() -> None:
    ours = [[1] * 40, [2] * 40, [3] * 40]
    assert agreement(ours, ours) == {
        "requests": 3, "of_requests": 3, "tokens": 120, "of_tokens": 120
    }  # fmt: skip
    theirs = [[1] * 40, [2] * 39 + [7], [3] * 20 + [7] + [3] * 19]
    assert agreement(ours, theirs) == {
        "requests": 1, "of_requests": 3, "tokens": 40 + 39 + 20, "of_tokens": 120
    }  # fmt: skip
    assert agreement([[1, 2]], [[1, 2, 3]])["requests"] == 0


def test_a_row_of_several_subjects() -> None:
    steady = {"short_s": [0.1, 0.1], "long_s": [0.2, 0.2]}
    records = {
        "ostinato": Record(**steady, tokens=[[1, 2, 3]]),
        "eager": Record(short_s=[0.1, 0.1], long_s=[0.3, 0.3], tokens=[[1, 2, 4]]),
        "hf": Record(short_s=[0.4, 0.1], long_s=[0.2, 0.2], tokens=[[1, 2, 3]]),
    }
    row = evaluate(records, ours="ostinato", batch=4, new_tokens=10)
    assert row["tpot_ms"] == {"ostinato": pytest.approx(10), "eager": pytest.approx(20)}
    assert row["tokens_per_s"] == {"ostinato": pytest.approx(400), "eager": pytest.approx(200)}
    assert row["speedup_over"] == {"eager": pytest.approx(2)}
    assert row["same_tokens_as"] == {"eager": False, "hf": True}
    assert row["agreement"]["eager"]["tokens"] == 2
    assert list(row["unusable"]) == ["hf"]
    del records["eager"], records["hf"]
    records["ostinato"] = Record(short_s=[0.4], long_s=[0.2])
    assert evaluate(records, ours="ostinato", batch=4, new_tokens=10)["speedup_over"] == {}


def test_a_wrapper_that_seems_to_cost_less_than_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def medians(subjects: Any, **options: Any) -> dict[str, float]:
        return {"wrapped": 2e-6, "bare": 3e-6}

    monkeypatch.setattr(core, "median_seconds", medians)
    with pytest.raises(MeasurementError, match=r"wrapped call took 2\.00 µs and the bare replay"):
        core.wrapper_microseconds(torch.device("cpu"))


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*decode*.json")), ids=lambda path: path.name)
def test_the_result_files_that_there_are_can_be_drawn(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw_file(path, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size


# --- where the time of a step goes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", GEMM),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", GEMM),
        ("triton_tem_fused_mm_4", GEMM),
        ("aten::linear", GEMM),
        ("triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_3", SMALL),
        ("void flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION),
        ("ostinato::paged_attention", ATTENTION),
        ("attend_kernel", ATTENTION),
        ("row_kernel", GEMM),
        ("rms_norm_kernel", SMALL),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::mul>", SMALL),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memset (Device)", COPIES),
    ],
)
def test_part_of(name: str, part: str) -> None:
    assert part_of(name) == part


def test_all_our_kernels_are_known() -> None:
    """A missing kernel would be counted as a small one."""
    found = set()
    for path in Path(ostinato.__path__[0]).glob("**/triton/*.py"):
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        found |= {each.name for each in functions if each.name.endswith("_kernel")}
    missing = sorted(found - set(KERNELS))
    assert not missing, f"say in timing/breakdown.py which part of a step these are: {missing}"


def test_overlap_counts_for_the_kernel_that_started_first() -> None:
    """As with programmatic dependent launch: the next kernel starts, and waits."""
    result = break_down(
        [
            Interval("attend_kernel", 108, 120),  # waits until 110; events come in any order
            Interval("row_kernel", 100, 110),
            Interval("rms_norm_kernel", 112, 115),  # all of it during the one before
            Interval("Memcpy DtoH", 124, 126),
        ],
        num_steps=2,
    )
    parts = {part: each["us"] for part, each in result["parts"].items()}
    assert parts == {GEMM: 5.0, ATTENTION: 5.0, SMALL: 0.0, COPIES: 1.0, GAPS: 2.0}
    assert result["window_us"] == 13
    assert result["parts"][SMALL]["count"] == 0.5
    assert result["parts"][GAPS]["count"] is None
    assert [(each["name"], each["us"]) for each in result["kernels"]] == [
        ("row_kernel", 5.0),
        ("attend_kernel", 5.0),
        ("Memcpy DtoH", 1.0),
        ("rms_norm_kernel", 0.0),
    ]


def test_no_kernels_at_all() -> None:
    assert break_down([], num_steps=3)["window_us"] == 0


NAMES = ["row_kernel", "attend_kernel", "rms_norm_kernel", "Memset (Device)"]
intervals = st.builds(
    lambda name, start, length: Interval(name, start, start + length),
    st.sampled_from(NAMES),
    st.integers(0, 60),
    st.integers(0, 20),
)


@given(st.lists(intervals, min_size=1, max_size=12))
def test_parts_add_up(events: list[Interval]) -> None:
    """Against a ticking clock: at each tick, the running kernel that started first."""
    result = break_down(events, num_steps=1)
    begin, end = min(each.start for each in events), max(each.end for each in events)
    busy = sum(
        any(each.start <= tick < each.end for each in events)
        for tick in range(int(begin), int(end))
    )
    assert result["window_us"] == end - begin
    assert sum(part["us"] for part in result["parts"].values()) == end - begin
    assert result["parts"][GAPS]["us"] == end - begin - busy
    first = {
        tick: min((each for each in events if each.start <= tick < each.end), key=lambda e: e.start)
        for tick in range(int(begin), int(end))
        if any(each.start <= tick < each.end for each in events)
    }
    if len({each.start for each in events}) == len(events):  # no ties
        for name in NAMES:
            ticks = sum(each.name == name for each in first.values())
            assert result["parts"][part_of(name)]["us"] == ticks


# --- the floor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_weight_bytes(tmp_path: Path, tied: bool, native: bool) -> None:
    """What transformers counts, without an embedding table of which only rows are read."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        # With another activation, our decoder rejects it, and transformers' code runs.
        hidden_act="silu" if native else "gelu_new",
    )
    with torch.random.fork_rng(devices=[]):
        theirs = LlamaForCausalLM(config)
        theirs.save_pretrained(tmp_path)
    expected = sum(each.numel() for each in theirs.parameters()) * 4
    if not tied:
        expected -= 96 * 32 * 4
    with LLM(str(tmp_path), device="cpu", show_progress=False) as llm:
        assert isinstance(llm.engine.model, torch.nn.Module) == native
        assert floor.weight_bytes(llm.engine.model, llm.engine.model_config) == expected


def test_weight_bytes_of_experts_are_unknown() -> None:
    model: Any = SimpleNamespace(module=torch.nn.Linear(4, 4))
    assert floor.weight_bytes(model, LlamaConfig(num_local_experts=8)) is None
    assert floor.weight_bytes(model, LlamaConfig()) == 20 * 4


def test_kv_bytes() -> None:
    def spec(window: int | None) -> AttentionSpec:
        return AttentionSpec(
            layer=0,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            value_dim=6,
            scale=1.0,
            window=window,
        )

    per_key = 2 * (8 + 6) * 2
    context = range(10, 15)
    assert floor.kv_bytes([spec(None)], torch.bfloat16, context) == 12 * per_key
    assert floor.kv_bytes([spec(3)], torch.bfloat16, context) == 3 * per_key
    # 10, 11, 12, 12, 12 keys
    assert floor.kv_bytes([spec(12)], torch.bfloat16, context) == pytest.approx(11.4 * per_key)
    both = floor.kv_bytes([spec(3), spec(None)], torch.bfloat16, context)
    assert both == pytest.approx(15 * per_key)


def test_bandwidth_is_that_of_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_CPU_BYTES", 2**20)
    measured = floor.measure_bandwidth(torch.device("cpu"))
    assert measured["num_bytes"] == 2**20
    assert measured["bytes_per_s"] == max(measured["ways"].values())
    assert measured["bytes_per_s"] == measured["ways"][measured["way"]]


# --- baselines ------------------------------------------------------------------------------------


class FakeModel:
    """Stands in for a transformers model; records its arguments."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.calls.append({"batch": len(ids), **options})
        new = torch.full((len(ids), options["max_new_tokens"]), 7)
        return torch.cat([ids, new], dim=1)


def test_compiled_transformers_are_compiled_once_for_each_batch_size() -> None:
    model = FakeModel()
    generate = baselines._transformers_compiled(model, longest=40)
    answers = [
        generate([[1, 2]] * batch, num_tokens) for batch, num_tokens in ((2, 3), (2, 5), (1, 3))
    ]
    assert answers == [[[7] * 3] * 2, [[7] * 5] * 2, [[7] * 3]]
    # Two warm-ups for a new batch size.
    assert [(call["batch"], call["max_new_tokens"]) for call in model.calls] == [
        *[(2, 3)] * 3,
        (2, 5),
        *[(1, 3)] * 3,
    ]
    for call in model.calls:
        assert call["cache_implementation"] == "static"
        assert call["max_cache_len"] == 40
        assert call["compile_config"]._compile_all_devices


def test_reasons_are_one_short_line() -> None:
    assert baselines.reason(ValueError("two\n  lines")) == "ValueError: two lines"
    assert len(baselines.reason(ValueError("x" * 9999))) == 300


# --- profiles and pictures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "name"),
    [("t.json", "t.batch8.json"), ("a.b.json.gz", "a.b.batch8.json.gz")],
)
def test_traces_have_a_file_for_each_batch(tmp_path: Path, given_name: str, name: str) -> None:
    profile.check_path(tmp_path / given_name)
    assert profile.trace_path(tmp_path / given_name, 8) == tmp_path / name


def result(**rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "llama-3.2-1b",
        "dtype": "bfloat16",
        "random_weights": True,
        "machine": {"gpu": "NVIDIA H200", "cpu": "", "torch": "2.11.0", "date": "2026-11-15"},
        "bandwidth": {"bytes_per_s": 4.39e12},
        "rows": [{"batch": int(batch[1:]), **row} for batch, row in rows.items()],
    }


def test_draw() -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw(
        result(
            b8={"tpot_ms": {"ostinato": 0.9, "hf": 12.0}, "floor_ms": 0.6},
            b1={"tpot_ms": {"ostinato": 0.8, "hf": 11.0, "hf-compile": 2.5}, "floor_ms": 0.5},
        )
    )
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "transformers": [[1, 11.0], [8, 12.0]],
        "transformers, compiled": [[1, 2.5]],  # where it did not fail
        "Ostinato": [[1, 0.8], [8, 0.9]],
        "floor: weights and KV at 4.39 TB/s": [[1, 0.5], [8, 0.6]],
    }
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]
    assert axes.get_ylim()[0] < 0.5
    title = axes.get_title(loc="left")
    assert all(text in title for text in ("llama-3.2-1b", "NVIDIA H200", "2026-11-15"))


def test_draw_a_result_without_a_floor() -> None:
    """Results without a floor can be plotted too."""
    pytest.importorskip("matplotlib")
    old = result(b1={"tpot_ms": {"ostinato": 0.8}})
    del old["bandwidth"]
    (axes,) = plot.draw(old).axes
    assert [line.get_label() for line in axes.lines] == ["Ostinato"]


def test_draw_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r"plotting needs matplotlib.*pip install"):
        plot.draw(result(b1={"tpot_ms": {"ostinato": 0.8}}))


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": [{"mode": "FULL"}]}'])
def test_only_results_of_decode_are_drawn(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a result of `ostinato bench decode`"):
        plot.draw_file(path, tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize("damage", [{"bandwidth": 3}, {"machine": {}}, {"rows": [{"tpot_ms": 3}]}])
def test_damaged_results_are_not_drawn(tmp_path: Path, damage: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    whole = result(b1={"tpot_ms": {"ostinato": 0.8}, "floor_ms": 0.5})
    path.write_text(json.dumps({**whole, **damage}))
    with pytest.raises(ConfigError, match=r"is a damaged result: (Key|Type)Error.*measure again"):
        plot.draw_file(path, tmp_path / "picture.png")
