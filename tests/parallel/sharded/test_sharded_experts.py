"""Mixtures of experts split over ranks by their width, against transformers in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_steps import run_request
from test_parallel_weights import rank_context_of
from test_sharded_decoder import STEPS, TOKENS
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, save_tiny
from transformers import AutoModelForCausalLM

from ostinato import set_forward_context
from ostinato.attention.reference import latent_cpu
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.bench.layouts.rank_step import make_batch, make_cache
from ostinato.errors import ConfigError
from ostinato.loading.load import load_model
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import draw_weights
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.comm import NoComm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder, build_base
from ostinato.parallel.sharded.sharded_models import build_models, draw_sharded_weights
from ostinato.parallel.sharded.sharding import Shard, own_experts
from ostinato.testing.loopback import LoopbackWorld

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[str, torch.Tensor]]:
    """A checkpoint of a family, and the logits of ``TOKENS`` by transformers."""
    made: dict[str, tuple[str, torch.Tensor]] = {}

    def make(name: str) -> tuple[str, torch.Tensor]:
        if name not in made:
            path = save_tiny(TINY_MIXTURES[name](), tmp_path_factory.mktemp(name))
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, attn_implementation="eager", dtype=torch.float32
            )
            with torch.no_grad():
                made[name] = str(path), model(torch.tensor([TOKENS])).logits[0]
        return made[name]

    return make


def logits_of(layout: ParallelLayout, path: str) -> list[torch.Tensor]:
    world = LoopbackWorld(layout.world_size)
    results = world.run(
        lambda rank: run_request(
            rank, layout, lambda ranks: world.comm(ranks, rank), path, TOKENS, STEPS
        )
    )
    return [result.logits for result in results]


@pytest.mark.parametrize("name", TINY_MIXTURES)
@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 2)])
def test_logits(name: str, sp: int, tp: int, reference: Any) -> None:
    path, expected = reference(name)
    for logits in logits_of(ParallelLayout(sp, tp), path):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "sp"), [("qwen2_moe", 1), ("deepseek_v2", 2), ("deepseek_v3", 2)])
def test_layers_fused(name: str, sp: int, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedDecoder, "_runs_fused", lambda self, hidden: True)
    monkeypatch.setattr(latent_cpu, "least_queries", lambda *_: 4)  # some prompts are expanded
    path, expected = reference(name)
    for logits in logits_of(ParallelLayout(sp, 2), path):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def parts_of(path: Path, rank: int) -> dict[str, torch.Tensor]:
    loaded = load_model(
        str(path),
        device=CPU,
        dtype=torch.float32,
        rank_context=dataclasses.replace(rank_context_of(1, 2, rank, CPU), threshold=0),
        tokenizer=False,
        show_progress=False,
    )
    assert isinstance(loaded.model, ShardedDecoder)
    return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}


def test_stacked_experts_are_split_alike(tmp_path: Path) -> None:
    """Whether a checkpoint has a tensor for each expert, or one for all."""
    save_tiny(TINY_MIXTURES["qwen3_moe"](), tmp_path / "each")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "each", dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for rank in range(2):
        each, stacked = parts_of(tmp_path / "each", rank), parts_of(tmp_path / "stacked", rank)
        assert each.keys() == stacked.keys()
        for key, weight in each.items():
            assert torch.equal(weight, stacked[key]), key


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_random_weights_are_parts_of_the_whole(name: str) -> None:
    config = DecoderConfig.from_hf(TINY_MIXTURES[name]())
    whole = Decoder(config, device=CPU, dtype=torch.float32)
    draw_weights(whole, 5)
    tensors = {slot.name: slot for slot in whole.weight_slots()}
    for rank in range(2):
        models = build_models(
            config, rank_context_of(1, 2, rank, CPU), device=CPU, dtype=torch.float32
        )
        for parameter in models[0].parameters():
            parameter.fill_(float("nan"))
        draw_sharded_weights(models, 5)
        assert not any(parameter.isnan().any() for parameter in models[0].parameters())
        for slot in models[0].weight_slots():
            if slot.name.endswith("norm.weight") or slot.parts == ():
                continue  # one, repeated for each head; a bias that another rank adds
            expected = in_file(tensors[slot.name])
            if slot.parts:
                expected = expected.index_select(slot.dim, rows_of(slot))
            assert torch.equal(slot.target.flatten(), expected.flatten()), (rank, slot.name)


def in_file(slot: WeightSlot) -> torch.Tensor:
    """The tensor that a slot of a whole model was read from."""
    target = slot.target.reshape(slot.shape)
    if slot.parts is None:
        return target
    return torch.empty_like(target).index_copy_(slot.dim, rows_of(slot), target)


def rows_of(slot: WeightSlot) -> torch.Tensor:
    assert slot.parts is not None
    return torch.tensor([row for part in slot.parts for row in part])


def test_widths_that_cannot_be_split_are_refused() -> None:
    config = DecoderConfig.from_hf(TINY_MIXTURES["qwen2_moe"]())
    assert config.experts is not None
    heads: dict[str, Any] = {"query_heads": (0,), "kv_heads": (0,), "index": 0, "size": 5}
    for message, changes in (
        ("experts of width 32", {"width": 32, "shared_width": 40}),
        ("a shared expert of width 32", {"width": 40, "shared_width": 32}),
    ):
        experts = dataclasses.replace(config.experts, **changes)
        other = dataclasses.replace(config, experts=experts, intermediate_size=40)
        with pytest.raises(ConfigError, match=f"{message} cannot be split evenly over 5 ranks"):
            Shard(config=other, **heads)


def test_the_width_of_layers_that_are_not_there_may_be_any() -> None:
    config = DecoderConfig.from_hf(TINY_MIXTURES["qwen3_moe"]())
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, layers=frozenset(range(config.num_layers)))
    other = dataclasses.replace(config, experts=experts, intermediate_size=33)
    Shard(config=other, query_heads=(0,), kv_heads=(0,), index=0, size=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3", "enable_expert_parallel is on, but the model has no mixture of experts"),
        ("gpt2", "only models of the native decoder run on several ranks .*, enable_expert"),
    ],
)
def test_models_whose_experts_cannot_be_spread(name: str, message: str, tmp_path: Path) -> None:
    save_tiny((TINY_NATIVE | TINY_GENERIC | TINY_MIXTURES)[name](), tmp_path)
    rank_context = dataclasses.replace(
        rank_context_of(1, 1, 0, CPU), threshold=0, spreads_experts=True
    )
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path), device=CPU, dtype=torch.float32, rank_context=rank_context)


def test_the_cache_of_latent_attention_is_not_split(tmp_path: Path) -> None:
    save_tiny(TINY_MIXTURES["deepseek_v3"](), tmp_path)
    rank_context = dataclasses.replace(
        rank_context_of(1, 2, 0, CPU), layout=ParallelLayout(tp=2, dcp=2), threshold=0
    )
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2, but the cache of"):
        load_model(str(tmp_path), device=CPU, dtype=torch.float32, rank_context=rank_context)


def test_a_rank_reads_its_experts_only(tmp_path: Path) -> None:
    """One by one or stacked; tensors of other ranks' experts may be there."""
    save_tiny(TINY_MIXTURES["mixtral"](), tmp_path / "each")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "each", dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for rank in range(2):
        rank_context = dataclasses.replace(
            rank_context_of(1, 2, rank, CPU), threshold=0, spreads_experts=True
        )
        each, stacked = (
            load_model(
                str(tmp_path / kind),
                device=CPU,
                dtype=torch.float32,
                rank_context=rank_context,
                tokenizer=False,
                show_progress=False,
            ).model
            for kind in ("each", "stacked")
        )
        assert isinstance(each, ShardedDecoder)
        assert isinstance(stacked, ShardedDecoder)
        theirs = model.model.layers[0].mlp.experts.gate_up_proj
        (ours, *_), (again, *_) = each.decoder_layers(), stacked.decoder_layers()
        assert ours.mixture is not None
        assert again.mixture is not None
        half = theirs.shape[0] // 2
        assert torch.equal(ours.mixture.gate_up, theirs[rank * half : (rank + 1) * half])
        assert torch.equal(ours.mixture.gate_up, again.mixture.gate_up)
        assert torch.equal(ours.mixture.down, again.mixture.down)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_replicas_with_batches_of_different_sizes(
    name: str, dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with padding of its own; small batches of half precision fuse norms into GEMMs."""
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: fused)
    config = DecoderConfig.from_hf(TINY_MIXTURES[name]())
    assert config.experts is not None
    num_experts, world = config.experts.num_experts, LoopbackWorld(2)
    whole = Decoder(config, device=CPU, dtype=dtype, max_position=64)
    draw_weights(whole, 3)
    for layer in whole.decoder_layers():  # large enough that an expert left out shows
        if layer.mixture is not None:
            layer.mixture.down.mul_(20)
    num_tokens, padded = (3, 6), (4, 6)

    def batch(rank: int, model: Decoder, across: torch.Tensor | None) -> torch.Tensor:
        cache = make_cache(model.attention_specs, max_tokens=8, context=4, device=CPU, dtype=dtype)
        for keys, values in cache.layers:
            keys.fill_(0.5)
            values.fill_(0.25)
        ids, positions, metadata = make_batch(
            "decode",
            num_tokens[rank],
            padded[rank],
            context=4,
            vocab_size=config.vocab_size,
            cache=cache,
            attention=TorchPagedAttention(),
        )
        ids = (ids + 17 * rank) % config.vocab_size
        with (
            torch.inference_mode(),
            set_forward_context(attn_metadata=metadata, num_tokens_across_dp=across),
        ):
            return model.forward(ids, positions)[: num_tokens[rank]]

    def run_rank(rank: int) -> tuple[torch.Tensor, dict[int, list[int]]]:
        model = build_base(
            config,
            ParallelLayout(),
            0,
            lambda ranks: NoComm(),
            device=CPU,
            dtype=dtype,
            max_position=64,
            experts=own_experts(num_experts, 2, rank),
            replicas=world.comm(range(2), rank),
        )
        copy_weights(whole, model)
        return batch(rank, model, torch.tensor(padded)), model.expert_load()

    results = world.run(run_rank)
    for rank, (hidden, _) in enumerate(results):
        tolerance = 1e-5 if dtype is torch.float32 else 0.03
        expected = batch(rank, whole, None)
        torch.testing.assert_close(hidden, expected, atol=tolerance, rtol=tolerance)
    counted, expected_load = [load for _, load in results], whole.expert_load()
    for number, counts in expected_load.items():
        assert [a + b for a, b in zip(*(load[number] for load in counted), strict=True)] == counts


def copy_weights(whole: Decoder, part: ShardedDecoder) -> None:
    """From a whole model on one device."""
    tensors = {slot.name: slot.target for slot in whole.weight_slots()}
    for slot in part.weight_slots():
        slot.target.copy_(tensors[slot.name])
