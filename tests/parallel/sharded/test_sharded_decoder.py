"""The sharded decoder with loopback ranks against transformers in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_steps import RankResult, Step, config_of, run_request
from transformers import AutoModelForCausalLM

from ostinato.errors import BatchError, ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder, build_base
from ostinato.parallel.sharded.sharding import Shard
from ostinato.testing.loopback import LoopbackWorld

LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
TOKENS = [(i * 29 + 3) % 97 for i in range(23)]
# Prompts whose lengths SP does not divide, decode with shift, another chunk with base, and so on.
STEPS = [Step(9, "base"), Step(1, "shift"), Step(2, "shift"), Step(5, "base")]
STEPS += [Step(1, "base"), Step(3, "shift"), Step(1, "shift"), Step(1, "base")]


@dataclass
class Reference:
    path: str
    logits: torch.Tensor
    keys: list[torch.Tensor]
    num_elements: int


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    made: dict[tuple[str, int], Reference] = {}

    def make(family: str, num_kv_heads: int) -> Reference:
        if (family, num_kv_heads) not in made:
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(
                config_of(family, num_kv_heads), attn_implementation="eager"
            ).eval()
            for parameter in model.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
            path: Path = tmp_path_factory.mktemp(f"{family}-{num_kv_heads}")
            model.save_pretrained(path)
            with torch.no_grad():
                output = model(torch.tensor([TOKENS]), use_cache=True)
            made[family, num_kv_heads] = Reference(
                str(path),
                output.logits[0],
                [layer.keys[0].transpose(0, 1) for layer in output.past_key_values.layers],
                sum(parameter.numel() for parameter in model.parameters()),
            )
        return made[family, num_kv_heads]

    return make


def run_all(layout: ParallelLayout, path: str) -> list[RankResult]:
    world = LoopbackWorld(layout.world_size)
    return world.run(
        lambda rank: run_request(
            rank, layout, lambda ranks: world.comm(ranks, rank), path, TOKENS, STEPS
        )
    )


def assert_right(results: list[RankResult], reference: Reference, *, keys_too: bool = True) -> None:
    for result in results:
        torch.testing.assert_close(result.logits, reference.logits, atol=1e-4, rtol=1e-4)
        if not keys_too:
            continue
        for keys, expected in zip(result.keys, reference.keys, strict=True):
            own = expected[:, list(result.kv_heads)]
            keys = keys[-own.shape[0] :]  # transformers keeps those that a window still sees
            torch.testing.assert_close(keys, own, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
def test_tokens_logits_and_cache(
    sp: int, tp: int, num_kv_heads: int, reference: Callable[[str, int], Reference]
) -> None:
    one = reference("llama", num_kv_heads)
    assert_right(run_all(ParallelLayout(sp, tp), one.path), one)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3", "gemma2", "gemma3", "granite", "phi3", "glm4"),
        *("smollm3", "exaone4", "cohere2", "starcoder2", "nemotron", "olmo2"),
    ],
)
def test_other_families(family: str, reference: Callable[[str, int], Reference]) -> None:
    one = reference(family, 2)
    # Their RoPE pairs neighbours, or a part of a head: our keys have their rows in another order.
    keys_too = family not in ("glm4", "cohere2", "nemotron")
    assert_right(run_all(ParallelLayout(2, 2), one.path), one, keys_too=keys_too)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
def test_layers_fused_and_written_out(
    sp: int,
    tp: int,
    fused: bool,
    family: str,
    reference: Callable[[str, int], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ShardedDecoder, "_runs_fused", lambda self, hidden: fused)
    one = reference(family, 2)
    assert_right(run_all(ParallelLayout(sp, tp), one.path), one)


class NaiveOrder(ParallelLayout):
    """The shift model's shards in rank order, as a naive layout would have them."""

    def shift_index(self, rank: int) -> int:
        return rank

    @property
    def shift_group(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2])
def test_the_naive_order_of_ranks_is_caught(
    num_kv_heads: int, reference: Callable[[str, int], Reference]
) -> None:
    one = reference("llama", num_kv_heads)
    with pytest.raises(AssertionError):
        assert_right(run_all(NaiveOrder(2, 2), one.path), one)


@pytest.mark.slow
def test_a_rank_reads_its_part_only(reference: Callable[[str, int], Reference]) -> None:
    one = reference("llama", 8)
    (alone,) = run_all(ParallelLayout(1, 1), one.path)
    assert alone.read == 2 * one.num_elements  # both models
    for result in run_all(ParallelLayout(1, 4), one.path):
        assert result.read < 0.3 * alone.read


def test_tokens_that_cannot_be_split_are_refused(
    reference: Callable[[str, int], Reference],
) -> None:
    layout = ParallelLayout(2, 1)
    config = DecoderConfig.from_hf(config_of("llama", 8))
    world = LoopbackWorld(2)

    def run(rank: int) -> None:
        model = build_base(
            config,
            layout,
            rank,
            lambda ranks: world.comm(ranks, rank),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        model.forward(torch.arange(3), torch.arange(3))

    with pytest.raises(BatchError, match=r"3 tokens cannot be split evenly over 2 ranks.* to 4"):
        world.run(run)


def test_widths_that_cannot_be_split_are_refused() -> None:
    config = DecoderConfig.from_hf(config_of("llama", 8))
    with pytest.raises(ConfigError, match="width 48 cannot be split evenly over 5 ranks"):
        Shard(config=config, query_heads=(0,), kv_heads=(0,), index=0, size=5)
