"""What mixtures of experts cost: against the decoder's own calls and weights, and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from test_parallel_cost import NVLINK, build, config_of, roofline
from tiny_models import TINY_MIXTURES

from ostinato import set_forward_context
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.bench.layouts.rank_step import SilentComm, make_batch, make_cache
from ostinato.cli.tables.parallel_tables import plan_tables
from ostinato.errors import ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.config.experts_config import ExpertsConfig
from ostinato.models.native.shapes import draw_weights
from ostinato.ops.experts.routing import RouterOptions
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import build_base
from ostinato.planner.communication import MODELS, Collective, Model, layer_collectives
from ostinato.planner.expert_parallel import ExpertParallelCost
from ostinato.planner.forecast import Question, run
from ostinato.planner.weights import (
    experts_touched,
    num_mixtures,
    rank_weights,
    replica_weights,
)
from ostinato.testing.recording_comm import CommCall, RecordingComm

CPU, META = torch.device("cpu"), torch.device("meta")
QWEN = config_of("qwen3-30b-a3b")
ALONE = ParallelLayout()


def tiny(name: str) -> DecoderConfig:
    return replace(DecoderConfig.from_hf(TINY_MIXTURES[name]()), num_heads=8)


# Latent attention is not predicted.
@pytest.mark.parametrize("name", [name for name in TINY_MIXTURES if "deepseek" not in name])
@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_that_the_decoder_has(model: Model, sp: int, tp: int, name: str) -> None:
    config, layout = tiny(name), ParallelLayout(sp, tp)
    decoder = build(config, layout, model, device=META)
    weights = rank_weights(config, layout, model)
    assert weights.total == sum(each.numel() for each in decoder.parameters())
    assert weights.experts == sum(experts_of(layer) for layer in decoder.decoder_layers())


def experts_of(layer: Any) -> int:
    mixture = layer.mixture
    if mixture is None:
        return 0
    tensors = (mixture.gate_up, mixture.down, mixture.gate_up_bias, mixture.down_bias)
    return sum(each.numel() for each in tensors if each is not None)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_weights_of_a_replica_with_spread_experts(name: str) -> None:
    config = tiny(name)
    experts = config.experts
    assert experts is not None
    decoder = build(config, ALONE, "base", device=META, experts=range(experts.num_experts // 2))
    weights = replica_weights(config, 2)
    assert weights.total == sum(each.numel() for each in decoder.parameters())
    assert weights.experts == sum(experts_of(layer) for layer in decoder.decoder_layers())


def test_collectives_are_those_that_the_decoder_calls() -> None:
    config, num_tokens = tiny("qwen2_moe"), 5  # of this replica, padded
    assert config.experts is not None
    assert 0 < num_mixtures(config) < config.num_layers
    called: list[CommCall] = []

    class Listed(RecordingComm):
        def _record(self, name: str, tensor: torch.Tensor) -> None:
            called.append(CommCall(name, tuple(tensor.shape), tensor.dtype))

    decoder = build_base(
        config,
        ALONE,
        0,
        partial(SilentComm, rank=0),
        device=CPU,
        dtype=torch.float32,
        max_position=64,
        experts=range(2),
        replicas=Listed(SilentComm(range(3), 0)),
    )
    draw_weights(decoder, seed=0)
    cache = make_cache(
        decoder.attention_specs, max_tokens=8, context=16, device=CPU, dtype=torch.float32
    )
    batch = make_batch(
        "decode",
        num_tokens,
        num_tokens,
        context=16,
        vocab_size=config.vocab_size,
        cache=cache,
        attention=TorchPagedAttention(),
    )
    with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
        decoder(batch.input_ids, batch.positions)
    once, layer = cost_of(3, config, itemsize=4).collectives(3 * num_tokens)
    assert [
        Collective(call.name, 3, torch.Size(call.shape).numel() * call.dtype.itemsize)  # type: ignore[arg-type]
        for call in called
    ] == [*once, *layer * num_mixtures(config)]


def cost_of(num_ranks: int, config: DecoderConfig = QWEN, itemsize: int = 2) -> ExpertParallelCost:
    return ExpertParallelCost(
        config=config,
        num_ranks=num_ranks,
        itemsize=itemsize,
        compute=roofline(config, itemsize=itemsize),
        interconnect=NVLINK,
    )


@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(4, 2, 2), (5, 1, 3), (3, 3, 1)])
def test_experts_touched(num_experts: int, top_k: int, num_tokens: int) -> None:
    """Against all that a batch can choose."""
    config = ExpertsConfig(
        num_experts=num_experts,
        width=8,
        options=RouterOptions(top_k=top_k),
        layers=frozenset({0}),
    )
    choices = list(combinations(range(num_experts), top_k))
    touched = [len(set().union(*batch)) for batch in product(choices, repeat=num_tokens)]
    assert experts_touched(config, num_tokens) == pytest.approx(sum(touched) / len(touched))


def test_a_step_by_hand() -> None:
    """Qwen3-30B-A3B: 128 experts of 3 x 2048 x 768 weights in each of 48 layers."""
    expert = 48 * 3 * 2048 * 768
    assert rank_weights(QWEN, ALONE, "base").experts == 128 * expert
    rest = rank_weights(QWEN, ALONE, "base").layers
    assert rest == 48 * (2048 * (2 * 4096 + 2 * 512 + 2 + 128) + 36 * 128)
    head, kv = 151936 * 2048, 48 * 2 * 4 * 128 * 512
    seconds = partial(roofline(QWEN).seconds, "base", ALONE, "decode")
    assert seconds(1) == pytest.approx(2 * (rest + 8 * expert + head + kv) / 4e12)
    touched = 128 * (1 - (120 / 128) ** 32)
    assert seconds(32) == pytest.approx(2 * (rest + touched * expert + head + 32 * kv) / 4e12)
    prompt = roofline(QWEN).seconds("base", ALONE, "prefill", 8192)
    assert prompt > 2 * (rest + 8 * expert) * 8192 / 1e15


def test_experts_split_and_spread() -> None:
    """Each of n ranks reads an nth of the touched experts, one way or the other."""
    compute, experts = roofline(QWEN), rank_weights(QWEN, ALONE, "base").experts
    whole = roofline(replace(QWEN, experts=None))  # with dense layers in their place
    dense = replica_weights(replace(QWEN, experts=None), 1).layers
    rest = replica_weights(QWEN, 4).layers
    assert replica_weights(QWEN, 4).experts == experts // 4
    assert rank_weights(QWEN, ParallelLayout(1, 4), "base").experts == experts // 4
    alone = compute.expert_parallel_seconds(1, "decode", 8)
    assert alone == pytest.approx(compute.seconds("base", ALONE, "decode", 8))
    touched = 128 * (1 - (120 / 128) ** 64) / 128 * experts / 4
    expected = whole.seconds("base", ALONE, "decode", 16) + 2 * (touched + rest - dense) / 4e12
    assert compute.expert_parallel_seconds(4, "decode", 64) == pytest.approx(expected)


def test_bytes_that_a_rank_sends() -> None:
    """With EP, a token's row goes to all others, and the parts of its result come back."""
    moved = cost_of(8).about()["layer_bytes_per_token"]
    assert moved == (7 / 8 + 7 / 8) * 2048 * 2
    tensor = layer_collectives(QWEN, ParallelLayout(1, 8), "base", 64, 2)
    assert sum(each.moved_bytes for each in tensor) / 64 == 2 * moved


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_more_tokens_never_take_less(kind: Any) -> None:
    steps = [cost_of(8).step(kind, size) for size in (1, 2, 8, 9, 100, 5000)]
    for less, more in pairwise(steps):
        assert less.compute <= more.compute
        assert less.communication <= more.communication


def test_experts_that_cannot_be_spread() -> None:
    with pytest.raises(ConfigError, match="128 experts cannot be spread evenly over 3 ranks"):
        cost_of(3)


def test_a_forecast() -> None:
    results = run(Question(model="qwen3-30b-a3b", gpus=[2, 4], max_tokens=64))
    spread = [row for row in results["steps"] if row["way"] == "EP"]
    assert {row["gpus"] for row in spread} == {2, 4}
    assert [each["gpus"] for each in results["expert_parallel"]] == [2, 4]
    for load in results["loads"]:
        assert [way["way"] for way in load["ways"]].count("EP") == 1
    assert any(
        line.startswith("experts: routers choose 8 of 128") for line in results["assumptions"]
    )
    assert any("(EP)" in str(getattr(part, "title", "")) for part in plan_tables(results))
    dense = run(Question(model="tiny", gpus=[2], max_tokens=8))
    assert dense["expert_parallel"] == []
    assert not any(row["way"] == "EP" for row in dense["steps"])


def test_layouts_by_the_width_of_experts() -> None:
    assert QWEN.experts is not None
    narrow = replace(QWEN, experts=replace(QWEN.experts, width=4))
    with pytest.raises(ConfigError, match="experts of width 4 cannot be split evenly over 8 ranks"):
        narrow.check_split(8)
    narrow.check_split(8, experts_whole=True)
