"""SwiftKV over several ranks against the same model in one process, by loopback and by gloo.

Other tests check the model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from paged_requests import PagedRequests, Piece
from safetensors.torch import save_file
from workers import GlooPool

from ostinato import set_forward_context
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import draw_weights
from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.native.swiftkv.decoder import SwiftKVDecoder, convert
from ostinato.parallel.comm import Comm
from ostinato.parallel.distributed import DistributedComm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.sharded.sharded_models import draw_sharded_weights
from ostinato.parallel.sharded.swiftkv_sharded import ShardedSwiftKV, build_swiftkv_models
from ostinato.testing.loopback import LoopbackWorld
from ostinato.testing.recording_comm import RecordingComm

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
EARLY, LAYERS, HIDDEN = 2, 4, 64
TOKENS = [[(7 * i + 29 * r + 3) % 97 for i in range(n)] for r, n in enumerate((14, 7, 9))]
# Token counts that SP does not divide; each request moves from model to model.
STEPS: list[tuple[str, list[Piece]]] = [
    ("base", [Piece(0, 0, 10), Piece(1, 0, 3), Piece(2, 0, 2)]),
    ("shift", [Piece(1, 3, 1), Piece(2, 2, 4)]),
    ("shift", [Piece(0, 10, 1), Piece(1, 4, 1), Piece(2, 6, 1)]),
    ("base", [Piece(0, 11, 1), Piece(1, 5, 1), Piece(2, 7, 1)]),
    ("base", [Piece(2, 8, 1), Piece(0, 12, 2)]),
    ("shift", [Piece(1, 6, 1)]),
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@dataclass
class Result:
    """Logits of each step's last tokens; per layer, keys and values of every whole request."""

    logits: list[torch.Tensor]
    caches: list[list[tuple[torch.Tensor, torch.Tensor]]]
    kv_heads: tuple[int, ...] = ()


def config_of(num_kv_heads: int, *, trained: bool, family: str = "llama") -> SwiftKVConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,  # not divisible: the last shard is shorter
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 64,
    }
    config: Any
    if family == "llama":
        config = transformers.LlamaConfig(
            **sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        )
    else:
        config = transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)
    return SwiftKVConfig(
        decoder=DecoderConfig.from_hf(config), num_key_value_layers=EARLY, trained=trained
    )


def save_random(config: SwiftKVConfig, path: Path) -> None:
    """A checkpoint in which every tensor matters."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for slot in SwiftKVDecoder(config, **OPTIONS).weight_slots():
        scale = 0.3 if len(slot.shape) == 1 else 0.2
        drawn = scale * torch.randn(slot.shape, generator=generator)
        weights[slot.name] = drawn + (1.0 if "norm" in slot.name else 0.0)
    save_file(weights, path / "model.safetensors")


def load(model: Decoder, path: str) -> None:
    checkpoint = Checkpoint(Path(path))
    ignored = ["lm_head.weight"] if model.lm_head is None else []
    checkpoint.check(model.weight_slots(), ignored=ignored)
    checkpoint.copy_into(model.weight_slots(), CPU, show_progress=False)


@torch.inference_mode()
def run_steps(models: dict[str, Any], layout: ParallelLayout) -> Result:
    """All steps on one cache; ``models`` are by the names in STEPS, with the head of "base"."""
    specs = models["base"].attention_specs
    assert specs == models["shift"].attention_specs, "both models use one cache"
    requests = PagedRequests(specs, TOKENS, device=CPU)
    logits = []
    for name, pieces in STEPS:
        num_tokens = sum(piece.count for piece in pieces)
        batch = requests.batch(
            pieces,
            padded_tokens=layout.padded_tokens(num_tokens) if name == "base" else num_tokens,
            # A step without a selection runs all of its tokens through all layers.
            num_selected=None if num_tokens == len(pieces) else len(pieces) + 1,
        )
        with set_forward_context(attn_metadata=batch.metadata):
            hidden = models[name].forward(batch.input_ids, batch.positions)
        ends = batch.metadata.query_start_loc[1:].long() - 1
        logits.append(models["base"].compute_logits(hidden[ends]))
    whole = [Piece(r, 0, len(tokens)) for r, tokens in enumerate(TOKENS)]
    caches = [[requests.stored(layer, piece) for piece in whole] for layer in range(LAYERS)]
    return Result(logits, caches)


def run_rank(
    rank: int,
    layout: ParallelLayout,
    comm_of: Callable[[Sequence[int]], Comm],
    config: SwiftKVConfig,
    path: str,
) -> Result:
    rank_context = RankContext(
        layout=layout,
        rank=rank,
        device=CPU,
        comm_of=comm_of,
        everyone=comm_of(tuple(range(layout.world_size))),
        threshold=4,
    )
    base, shift = build_swiftkv_models(config, rank_context, **OPTIONS)
    assert base.late is shift.late
    load(base, path)
    load(shift, path)
    result = run_steps({"base": base, "shift": shift}, layout)
    heads = layout.heads(config.decoder.num_heads, config.decoder.num_kv_heads)
    result.kv_heads = tuple(heads.kv_heads(layout.shift_index(rank)))
    return result


def run_alone(config: SwiftKVConfig, path: str) -> Result:
    model = SwiftKVDecoder(config, **OPTIONS)
    load(model, path)
    return run_steps({"base": model, "shift": model}, ParallelLayout())


def run_by_loopback(layout: ParallelLayout, config: SwiftKVConfig, path: str) -> list[Result]:
    world = LoopbackWorld(layout.world_size)
    return world.run(
        lambda rank: run_rank(rank, layout, lambda ranks: world.comm(ranks, rank), config, path)
    )


def assert_same(results: list[Result], alone: Result) -> None:
    assert alone.logits[0].std() > 1
    for result in results:
        for mine, its in zip(result.logits, alone.logits, strict=True):
            torch.testing.assert_close(mine, its, **TOLERANCE)
        heads = list(result.kv_heads)
        for layer, expected in zip(result.caches, alone.caches, strict=True):
            for mine_both, its_both in zip(layer, expected, strict=True):
                for mine, its in zip(mine_both, its_both, strict=True):
                    torch.testing.assert_close(mine, its[:, heads], **TOLERANCE)


@pytest.mark.sweep
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
def test_logits_and_cache(sp: int, tp: int, num_kv_heads: int, tmp_path: Path) -> None:
    config = config_of(num_kv_heads, trained=True)
    save_random(config, tmp_path)
    alone = run_alone(config, str(tmp_path))
    assert_same(run_by_loopback(ParallelLayout(sp, tp), config, str(tmp_path)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_other_names_and_families(trained: bool, tmp_path: Path) -> None:
    config = config_of(2, trained=trained, family="qwen3")
    save_random(config, tmp_path)
    alone = run_alone(config, str(tmp_path))
    assert_same(run_by_loopback(ParallelLayout(2, 2), config, str(tmp_path)), alone)


class NaiveOrder(ParallelLayout):
    """Late layers in rank order, as a naive layout would have them."""

    def shift_index(self, rank: int) -> int:
        return rank

    @property
    def shift_group(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))


@pytest.mark.slow
def test_the_naive_order_of_ranks_is_caught(tmp_path: Path) -> None:
    config = config_of(2, trained=True)
    save_random(config, tmp_path)
    alone = run_alone(config, str(tmp_path))
    with pytest.raises(AssertionError):
        assert_same(run_by_loopback(NaiveOrder(2, 2), config, str(tmp_path)), alone)


def test_late_layers_trade_the_selected_tokens_only(tmp_path: Path) -> None:
    config = config_of(8, trained=True)
    save_random(config, tmp_path)
    layout, world = ParallelLayout(2, 2), LoopbackWorld(4)

    def calls_of(rank: int) -> list[tuple[str, int]]:
        recorders: dict[tuple[int, ...], RecordingComm] = {}

        def comm_of(ranks: Sequence[int]) -> Comm:
            group = tuple(ranks)
            return recorders.setdefault(group, RecordingComm(world.comm(group, rank)))

        rank_context = RankContext(
            layout=layout,
            rank=rank,
            device=CPU,
            comm_of=comm_of,
            everyone=world.comm(range(4), rank),
        )
        (base,) = build_swiftkv_models(config, rank_context, **OPTIONS)  # no shift model
        load(base, str(tmp_path))
        requests = PagedRequests(base.attention_specs, TOKENS, device=CPU)
        batch = requests.batch(STEPS[0][1], padded_tokens=16, num_selected=5)
        with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
            base.forward(batch.input_ids, batch.positions)
        late = recorders[layout.shift_group].calls
        early = recorders[layout.tensor_group(rank)].calls
        assert all(call.shape == (8, HIDDEN) for call in early)  # half of 16 tokens
        return [(call.name, call.shape[0]) for call in late]

    for calls in world.run(calls_of):
        assert calls == [("all_reduce", 5)] * 2 * (LAYERS - EARLY)


def test_random_weights_are_those_of_a_converted_decoder() -> None:
    config = config_of(4, trained=False)
    whole = Decoder(config.decoder, **OPTIONS)
    draw_weights(whole, seed=3)
    converted = convert(whole, EARLY)
    alone = run_steps({"base": converted, "shift": converted}, ParallelLayout())
    layout, world = ParallelLayout(2, 2), LoopbackWorld(4)

    def run(rank: int) -> list[torch.Tensor]:
        rank_context = RankContext(
            layout=layout,
            rank=rank,
            device=CPU,
            comm_of=lambda ranks: world.comm(ranks, rank),
            everyone=world.comm(range(4), rank),
            threshold=4,
        )
        models: list[ShardedSwiftKV] = build_swiftkv_models(config, rank_context, **OPTIONS)
        draw_sharded_weights(models, 3)
        return run_steps(dict(zip(("base", "shift"), models, strict=True)), layout).logits

    for logits in world.run(run):
        for mine, its in zip(logits, alone.logits, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-4)


def test_no_late_layers(tmp_path: Path) -> None:
    config = SwiftKVConfig(
        decoder=config_of(2, trained=True).decoder, num_key_value_layers=LAYERS, trained=True
    )
    world = LoopbackWorld(2)

    def build(rank: int) -> bool:
        rank_context = RankContext(
            layout=ParallelLayout(1, 2),
            rank=rank,
            device=CPU,
            comm_of=lambda ranks: world.comm(ranks, rank),
            everyone=world.comm(range(2), rank),
        )
        (base,) = build_swiftkv_models(config, rank_context, **OPTIONS)
        names = {slot.name for slot in base.weight_slots()}
        assert names == {slot.name for slot in Decoder(config.decoder, **OPTIONS).weight_slots()}
        assert len(base.attention_specs) == LAYERS
        return base.selects_tokens

    assert world.run(build) == [False, False]


# --- processes ----------------------------------------------------------------------------------


def run_process(sp: int, tp: int, config: SwiftKVConfig, path: str) -> Result:
    """On one process of a world of sp x tp."""
    layout, rank = ParallelLayout(sp, tp), dist.get_rank()
    made: dict[tuple[int, ...], Comm] = {}
    # All ranks create the groups together, in one order.
    for group in (
        tuple(range(layout.world_size)),
        layout.tensor_group(rank),
        layout.sequence_group(rank),
        layout.shift_group,
        (rank,),
    ):
        if group not in made:
            made[group] = DistributedComm(group, CPU)
    return run_rank(rank, layout, lambda ranks: made[tuple(ranks)], config, path)


@pytest.mark.slow
@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 1)])
def test_processes(gloo_pool: GlooPool, tmp_path: Path, sp: int, tp: int) -> None:
    config = config_of(4, trained=True)
    save_random(config, tmp_path)
    alone = run_alone(config, str(tmp_path))
    results = gloo_pool.run(run_process, sp, tp, config, str(tmp_path), world_size=2)
    assert len(results) == 2
    assert_same(results, alone)
