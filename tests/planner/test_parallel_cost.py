"""The multi-GPU planner: against the decoder's own calls and weights, and by property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import set_forward_context
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.bench.layouts.rank_step import SilentComm, make_batch, make_cache
from ostinato.errors import ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.config.families import FAMILIES
from ostinato.models.native.config.latent_config import LatentConfig
from ostinato.models.native.shapes import draw_weights, shape_config
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import build_base, build_shift
from ostinato.planner.communication import (
    MODELS,
    Collective,
    Interconnect,
    Model,
    head_counts,
    layer_collectives,
    outer_collectives,
)
from ostinato.planner.compute import Measured, Roofline, _attended
from ostinato.planner.cost import (
    KINDS,
    Kind,
    LayoutCost,
    Load,
    best_threshold,
    check_layout,
    default_layouts,
    layouts_of,
)
from ostinato.planner.predict import predict, ways
from ostinato.planner.weights import rank_weights
from ostinato.testing.recording_comm import CommCall, RecordingComm

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (8, 1)]
NVLINK = Interconnect(bandwidth=450e9, latency=10e-6)
CPU = torch.device("cpu")


def config_of(shape: str = "tiny", **changes: Any) -> DecoderConfig:
    config = DecoderConfig.from_hf(shape_config(shape))
    return replace(config, **changes)


TINY = config_of(num_heads=8, num_kv_heads=2, vocab_size=97)
LLAMA = config_of("llama-3.1-8b")
_SIZES = LatentConfig(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=16, v_head_dim=20)
LATENT = replace(TINY, num_kv_heads=8, latent=_SIZES)
DEEPSEEK = config_of("deepseek-v2-lite")


def build(config: DecoderConfig, layout: ParallelLayout, model: Model, **options: Any) -> Any:
    options = {"device": CPU, "dtype": torch.float32, "max_position": 64} | options
    comm_of = options.pop("comm_of", partial(SilentComm, rank=0))
    if model == "base":
        return build_base(config, layout, 0, comm_of, **options)
    return build_shift(replace(config, tied_head=True), layout, 0, comm_of, **options)


# --- what the decoder does ------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_collectives_are_those_that_the_decoder_calls(
    model: Model, sp: int, tp: int, num_kv_heads: int
) -> None:
    check_collectives(replace(TINY, num_kv_heads=num_kv_heads), ParallelLayout(sp, tp), model)


@pytest.mark.parametrize("model", MODELS)
def test_collectives_of_norms_over_all_heads(model: Model) -> None:
    check_collectives(replace(TINY, qk_norm="full"), ParallelLayout(2, 2), model)


@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_collectives_of_latent_attention(model: Model, sp: int, tp: int) -> None:
    check_collectives(LATENT, ParallelLayout(sp, tp), model)


def check_collectives(config: DecoderConfig, layout: ParallelLayout, model: Model) -> None:
    num_tokens = 5
    called: list[tuple[int, CommCall]] = []

    class Listed(RecordingComm):
        def _record(self, name: str, tensor: torch.Tensor) -> None:
            called.append((self.size, CommCall(name, tuple(tensor.shape), tensor.dtype)))

    def comm_of(ranks: Sequence[int]) -> Listed:
        return Listed(SilentComm(ranks, 0))

    decoder = build(config, layout, model, comm_of=comm_of)
    draw_weights(decoder, seed=0)
    head = build(config, layout, "base", comm_of=comm_of)
    cache = make_cache(
        decoder.attention_specs, max_tokens=8, context=16, device=CPU, dtype=torch.float32
    )
    batch = make_batch(
        "decode",
        num_tokens,
        layout.padded_tokens(num_tokens) if model == "base" else num_tokens,
        context=16,
        vocab_size=config.vocab_size,
        cache=cache,
        attention=TorchPagedAttention(),
    )
    with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
        hidden = decoder(batch.input_ids, batch.positions)
        logits = head.compute_logits(hidden[:3])
    assert logits.shape == (3, config.vocab_size)

    before, after = outer_collectives(config, layout, model, num_tokens, 3, 4)
    layer = layer_collectives(config, layout, model, num_tokens, 4)
    expected = [*before, *layer * config.num_layers, *after]
    sizes = [torch.Size(call.shape).numel() * call.dtype.itemsize for _, call in called]
    assert expected == [
        Collective(call.name, num_ranks, num_bytes)  # type: ignore[arg-type]
        for (num_ranks, call), num_bytes in zip(called, sizes, strict=True)
    ]


CONFIGS = {
    "llama": TINY,
    "tied": replace(TINY, tied_head=True),
    "biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk_norm": replace(TINY, qk_norm="head", num_kv_heads=1),
    "norms over all heads": replace(TINY, qk_norm="full"),
    "latent": LATENT,
    "latent queries": replace(
        LATENT,
        latent=replace(_SIZES, q_lora_rank=24),
        qkv_bias=True,
        output_bias=True,
    ),
    "four norms": replace(TINY, names=FAMILIES["gemma2"].names),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_that_the_decoder_has(
    model: Model, sp: int, tp: int, config: DecoderConfig
) -> None:
    layout = ParallelLayout(sp, tp)
    decoder = build(config, layout, model, device=torch.device("meta"))
    weights = rank_weights(config, layout, model)
    assert weights.total == sum(each.numel() for each in decoder.parameters())
    assert weights.layers == sum(
        each.numel() for layer in decoder.decoder_layers() for each in layer.parameters()
    )


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
def test_heads_are_those_of_the_layout(sp: int, tp: int, num_kv_heads: int) -> None:
    layout, config = ParallelLayout(sp, tp), replace(TINY, num_kv_heads=num_kv_heads)
    heads = layout.heads(8, num_kv_heads)
    base = len(heads.base_query_heads(0)), len(heads.base_kv_heads(0))
    assert head_counts(config, layout, "base") == base
    shift = len(heads.query_heads(0)), len(heads.kv_heads(0))
    assert head_counts(config, layout, "shift") == shift


# --- communication --------------------------------------------------------------------------------


def test_bytes_that_a_rank_sends() -> None:
    assert Collective("all_reduce", 4, 100).moved_bytes == 150
    assert Collective("all_to_all", 4, 100).moved_bytes == 75
    assert Collective("all_gather", 4, 100).moved_bytes == 300
    assert Collective("all_reduce", 1, 100).moved_bytes == 0


def test_volume_of_a_layer() -> None:
    """Tensor parallel sends the hidden states almost four times; Ulysses, a share of the heads."""
    hidden, size = LLAMA.hidden_size * 2, 1024

    def moved(sp: int, tp: int, model: Model) -> float:
        listed = layer_collectives(LLAMA, ParallelLayout(sp, tp), model, size, 2)
        return sum(each.moved_bytes for each in listed) / size

    assert moved(1, 8, "base") == 2 * 2 * 7 / 8 * hidden
    assert moved(8, 1, "shift") == moved(1, 8, "base")
    heads = (32 + 2 * 8 + 32) * 128 * 2
    assert moved(8, 1, "base") == 7 / 8 * heads / 8
    assert moved(4, 2, "base") == 3 / 4 * heads / 8 + 2 * 2 * 1 / 2 * hidden / 4


def test_seconds_are_latency_and_bytes_over_bandwidth() -> None:
    link = Interconnect(bandwidth=100.0, latency=0.5)
    calls = [Collective("all_reduce", 2, 200), Collective("all_gather", 1, 999)]
    assert link.seconds(calls) == 0.5 + 200 / 100
    assert link.seconds([]) == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"bandwidth": 0.0, "latency": 1.0}, "bandwidth between GPUs must be a number above 0"),
        ({"bandwidth": -1.0, "latency": 1.0}, "above 0, got -1.0"),
        ({"bandwidth": float("nan"), "latency": 1.0}, "above 0, got nan"),
        ({"bandwidth": float("inf"), "latency": 1.0}, "above 0, got inf"),
        ({"bandwidth": 1.0, "latency": -1e-6}, "latency of a collective must be .* at least 0"),
    ],
)
def test_impossible_interconnects(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Interconnect(**numbers)


# --- compute --------------------------------------------------------------------------------------


def roofline(config: DecoderConfig = LLAMA, **changes: Any) -> Roofline:
    numbers: dict[str, Any] = {"bandwidth": 4e12, "flops": 1e15, "context": 512, "itemsize": 2}
    return Roofline(config=config, **numbers | changes)


def test_roofline_by_hand() -> None:
    """Llama 3.1 8B on one GPU: 6.98e9 weights in its layers, 0.525e9 in its head."""
    layers, head = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2), 128256 * 4096
    kv = 32 * 2 * 8 * 128 * 2  # bytes per token
    alone = ParallelLayout()
    seconds = roofline().seconds("base", alone, "decode", 1)
    assert seconds == pytest.approx((2 * layers + 2 * head + 512 * kv) / 4e12)
    seconds = roofline().seconds("base", alone, "prefill", 2048)
    pairs = 2048 * 2049 // 2
    arithmetic = 2 * layers * 2048 + 32 * 4 * 32 * 128 * pairs
    assert seconds == pytest.approx(arithmetic / 1e15 + 2 * head / 4e12)


def test_roofline_of_latent_attention() -> None:
    """DeepSeek-V2-Lite: the row that every rank reads is not split, and the heads are."""
    costs = [
        roofline(DEEPSEEK, **numbers)._attention("decode", 32, (16 // tp, 16 // tp))
        for tp in (1, 2)
        for numbers in ({"flops": 1e30}, {"bandwidth": 1e30})
    ]
    keys = 27 * 32 * 512
    read, scored = keys * 576 * 2 / 4e12, keys * 16 * 2 * (576 + 512) / 1e15
    assert costs == pytest.approx([read, scored, read, scored / 2])
    # From 2,304 tokens on, keys and values of the heads are computed.
    for size, pair, key in ((2303, 2 * (576 + 512), 0), (2304, 2 * (192 + 128), 2 * 512 * 256)):
        seconds = roofline(DEEPSEEK, bandwidth=1e30)._attention("prefill", size, (16, 16))
        pairs = size * (size + 1) // 2
        assert seconds == pytest.approx(27 * 16 * (pairs * pair + size * key) / 1e15)


def test_roofline_of_parts() -> None:
    """The shift model reads its share of all ranks, the base model its share of TP; one head."""
    few = partial(roofline().seconds, kind="decode", num_tokens=1)
    slow = roofline(flops=1e30).seconds("base", ParallelLayout(8, 1), "decode", 8)
    assert few("base", ParallelLayout(8, 1)) < slow  # reads the same, but has seven fewer tokens
    assert few("shift", ParallelLayout(8, 1)) < few("base", ParallelLayout(8, 1)) / 3
    assert few("shift", ParallelLayout(8, 1)) > few("base", ParallelLayout(1, 8))  # a whole head
    many = partial(roofline().seconds, kind="prefill", num_tokens=2048)
    assert many("base", ParallelLayout(8, 1)) == pytest.approx(
        many("shift", ParallelLayout(8, 1)), rel=0.01
    )


@given(
    kind=st.sampled_from(KINDS),
    num_tokens=st.integers(1, 40),
    context=st.integers(1, 40),
    window=st.none() | st.integers(1, 50),
)
def test_attended_keys(kind: Kind, num_tokens: int, context: int, window: int | None) -> None:
    """Against counting query by query."""
    limit = window or 10**9
    if kind == "decode":
        seen = [min(context, limit)] * num_tokens
        assert _attended(kind, num_tokens, context, window) == (sum(seen), sum(seen))
    else:
        seen = [min(place, limit) for place in range(1, num_tokens + 1)]
        assert _attended(kind, num_tokens, context, window) == (num_tokens, sum(seen))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"bandwidth": 0.0}, "memory bandwidth must be a number above 0"),
        ({"flops": float("nan")}, "peak FLOP rate must be a number above 0"),
        ({"context": 0}, "context must be at least 1, got 0"),
    ],
)
def test_impossible_rooflines(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roofline(**numbers)


def result(**changes: Any) -> dict[str, Any]:
    """A measured 2x1: base takes 10 ms, shift 1 ms per token; prefill takes twice as long."""
    rows = [
        {
            "sp": 2,
            "tp": 1,
            "kind": kind,
            "num_tokens": size,
            "base_ms": 10.0 * times,
            "shift_ms": float(size) * times,
        }
        for kind, times in (("decode", 1), ("prefill", 2))
        for size in (2, 4, 16, 32)
    ]
    about = {"model": "tiny", "dtype": "bfloat16", "context": 32}
    return {**about, "rows": rows, **changes}


def test_measured_times() -> None:
    measured = Measured(result(), "it")
    layout = ParallelLayout(2, 1)
    assert measured.layouts == [layout]
    assert (measured.max_tokens, measured.num_tokens) == (32, [2, 4, 16, 32])
    seconds = partial(measured.seconds, "shift", layout)
    assert seconds("decode", 4) == 4e-3
    assert seconds("prefill", 4) == 8e-3
    assert seconds("decode", 10) == pytest.approx(10e-3)  # between
    assert seconds("decode", 1) == 2e-3  # below
    with pytest.raises(ConfigError, match=r"it ends at 32 tokens .* 2x1, but 33 tokens were"):
        seconds("decode", 33)
    with pytest.raises(ConfigError, match=r"no decode times .* layout 1x2; it has the layouts 2x1"):
        measured.seconds("base", ParallelLayout(1, 2), "decode", 4)


@pytest.mark.parametrize(
    "changed",
    [
        [],
        {},
        "text",
        None,
        result(rows=[{"mode": "FULL"}]),
        result(rows=None),
        result(context="many"),
        result(context=float("inf")),
        result(machine=7),
        result(rows=[result()["rows"][0] | {"kind": "mixed"}]),
        result(rows=[result()["rows"][0] | {"base_ms": None}]),
        result(rows=[result()["rows"][0] | {"shift_ms": float("nan")}]),
        result(rows=[result()["rows"][0] | {"shift_ms": -1.0}]),
    ],
    ids=str,
)
def test_other_files_are_refused(changed: Any) -> None:
    with pytest.raises(ConfigError, match="it is not a result of `ostinato bench parallel`"):
        Measured(changed, "it")


def test_a_result_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has no measurements"):
        Measured(result(rows=[]), "it")


# --- steps ----------------------------------------------------------------------------------------


def cost_of(layout: tuple[int, int], **changes: Any) -> LayoutCost:
    numbers: dict[str, Any] = {
        "config": LLAMA,
        "itemsize": 2,
        "compute": roofline(),
        "interconnect": NVLINK,
        "max_tokens": 64,
    }
    return LayoutCost(layout=ParallelLayout(*layout), **numbers | changes)


layouts = st.sampled_from(LAYOUTS)
models = st.sampled_from(MODELS)
kinds = st.sampled_from(KINDS)


@given(layout=layouts, model=models, kind=kinds, sizes=st.tuples(*[st.integers(1, 5000)] * 2))
def test_more_tokens_never_take_less(
    layout: tuple[int, int], model: Model, kind: Kind, sizes: tuple[int, int]
) -> None:
    few, many = sorted(sizes)
    cost = cost_of(layout)
    less, more = cost.step(model, kind, few), cost.step(model, kind, many)
    assert less.compute <= more.compute
    assert less.communication <= more.communication


@given(
    layout=layouts,
    model=models,
    kind=kinds,
    size=st.integers(1, 5000),
    bandwidths=st.tuples(*[st.floats(1e9, 1e12)] * 2),
    latencies=st.tuples(*[st.floats(0, 1e-3)] * 2),
)
def test_a_better_interconnect_never_takes_longer(
    layout: tuple[int, int],
    model: Model,
    kind: Kind,
    size: int,
    bandwidths: tuple[float, float],
    latencies: tuple[float, float],
) -> None:
    worse = Interconnect(bandwidth=min(bandwidths), latency=max(latencies))
    for better in (
        Interconnect(bandwidth=max(bandwidths), latency=max(latencies)),
        Interconnect(bandwidth=min(bandwidths), latency=min(latencies)),
    ):
        fast = cost_of(layout, interconnect=better).step(model, kind, size)
        slow = cost_of(layout, interconnect=worse).step(model, kind, size)
        assert fast.compute == slow.compute
        assert fast.total <= slow.total


@given(model=models, kind=kinds, size=st.integers(1, 5000))
def test_one_gpu_has_no_communication(model: Model, kind: Kind, size: int) -> None:
    step = cost_of((1, 1)).step(model, kind, size)
    assert step.communication == 0
    assert step.total == step.compute == cost_of((1, 1)).step("base", kind, size).total


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_sequence_parallelism_both_models_are_one(ranks: int) -> None:
    cost = cost_of((1, ranks))
    for kind in KINDS:
        assert cost.step("base", kind, 7) == cost.step("shift", kind, 7)
    assert cost.threshold == 0
    assert cost.thresholds == {"decode": 0, "prefill": 0}


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="32 query heads cannot be divided evenly among sp=3"):
        cost_of((3, 1))
    with pytest.raises(ConfigError, match="width 6 cannot be split evenly over 4 ranks"):
        check_layout(replace(TINY, intermediate_size=6), ParallelLayout(4, 1))


def test_default_layouts() -> None:
    assert [layout.world_size for layout in default_layouts(LLAMA)] == [2, 2, 4, 4, 4, 8, 8, 8, 8]
    assert default_layouts(config_of("smollm2-135m")) == [
        ParallelLayout(3, 1),
        ParallelLayout(1, 3),
    ]
    assert layouts_of(LLAMA, 4) == [
        ParallelLayout(4, 1),
        ParallelLayout(2, 2),
        ParallelLayout(1, 4),
    ]
    with pytest.raises(ConfigError, match=r"cannot be split over 2 to 8 ranks: it has 1 heads"):
        default_layouts(replace(TINY, num_heads=1, num_kv_heads=1))


# --- thresholds -----------------------------------------------------------------------------------

times = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)


@given(times)
def test_threshold_is_the_smallest_of_the_best(pairs: list[tuple[int, int]]) -> None:
    """Against brute force."""
    base, shift = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    totals = [sum(shift[:place]) + sum(base[place:]) for place in range(len(pairs) + 1)]
    assert best_threshold(base, shift) == totals.index(min(totals))


@given(
    start=st.integers(0, 50),
    slope=st.integers(1, 9),
    flat=st.integers(0, 300),
    n=st.integers(1, 60),
)
def test_threshold_is_where_curves_cross(start: int, slope: int, flat: int, n: int) -> None:
    sizes = range(1, n + 1)
    shift = [start + slope * size for size in sizes]
    below = [size for size in sizes if shift[size - 1] < flat]
    assert best_threshold([flat] * n, shift) == (below[-1] if below else 0)


def test_ties() -> None:
    assert best_threshold([1, 1, 1], [1, 1, 1]) == 0  # no faster, so not worth its memory
    assert best_threshold([2, 1, 1], [1, 1, 2]) == 1
    assert best_threshold([2, 2, 2], [1, 1, 1]) == 3  # always
    assert best_threshold([], []) == 0


@pytest.mark.sweep
@pytest.mark.parametrize(("sp", "tp"), [(2, 1), (4, 2), (8, 1), (2, 4)])
def test_thresholds_of_a_model(sp: int, tp: int) -> None:
    cost = cost_of((sp, tp), max_tokens=2048)
    for kind, threshold in cost.thresholds.items():
        assert 64 < threshold < 2048
        at, above = (
            cost.step("shift", kind, size).total - cost.step("base", kind, size).total
            for size in (threshold - sp, threshold + sp)  # the base model is padded to SP
        )
        assert at < 0 < above
    assert min(cost.thresholds.values()) <= cost.threshold <= max(cost.thresholds.values())
    assert cost.shifted("decode", cost.threshold, cost.threshold) == cost.step(
        "shift", "decode", cost.threshold
    )
    assert cost.shifted("decode", cost.threshold + 1, cost.threshold) == cost.step(
        "base", "decode", cost.threshold + 1
    )


def test_threshold_of_a_measurement() -> None:
    """Without communication, 10 ms and 1 ms per token meet at 10 tokens."""
    free = Interconnect(bandwidth=1e30, latency=0.0)
    cost = cost_of(
        (2, 1),
        config=config_of(),
        compute=Measured(result(), "it"),
        interconnect=free,
        max_tokens=32,
    )
    assert cost.threshold in (9, 10)
    assert cost.thresholds in ({"decode": 9, "prefill": 9}, {"decode": 10, "prefill": 10})


# --- loads ----------------------------------------------------------------------------------------


def test_seconds_of_a_load() -> None:
    load = Load(name="some", num_reqs=3, prompt_tokens=10, output_tokens=5)
    steps: list[tuple[Kind, int]] = []

    def step(kind: Kind, num_tokens: int) -> float:
        steps.append((kind, num_tokens))
        return {"prefill": 100.0, "decode": 1.0}[kind] * num_tokens

    assert load.seconds(step, max_tokens=8) == 100 * 30 + 4 * 3
    assert steps == [("prefill", 8), ("prefill", 6), ("decode", 3)]
    assert load.seconds(step, max_tokens=10) == 100 * 30 + 4 * 3
    with pytest.raises(ConfigError, match=r"decodes 3 requests together, .* at most 2 tokens"):
        load.seconds(step, max_tokens=2)


def test_predictions() -> None:
    costs = [cost_of(layout) for layout in ((2, 1), (1, 2), (2, 2))]
    assert [(way.name, way.cost.layout.world_size) for way in ways(costs)] == [
        ("SP", 2),
        ("shift", 2),
        ("TP", 2),
        ("SP+TP", 4),
        ("shift", 4),
    ]
    predicted = predict(costs, [1, 64])
    assert len(predicted["steps"]) == 5 * 2 * 2
    for row in predicted["steps"]:
        assert 0 < row["communication_ms"] < row["ms"]
    for load in predicted["loads"]:
        best = min(way["seconds"] for way in load["ways"])
        assert load["best"]["seconds"] == best
        assert {way["gpus"] for way in load["ways"]} == {load["gpus"]}
    assert [load["gpus"] for load in predicted["loads"]] == [2, 2, 4, 4]
    shifted = [row for row in predicted["steps"] if row["way"] == "shift" and row["gpus"] == 2]
    others = [row for row in predicted["steps"] if row["way"] == "SP" and row["gpus"] == 2]
    for ours, base in zip(shifted, others, strict=True):
        assert ours["ms"] <= base["ms"]
    assert all(a["ms"] <= b["ms"] for a, b in pairwise(shifted[:2]))
