"""Mixtures of experts on two ranks against one process: the same tokens, and the same counts.

Split over tensor-parallel ranks by their width, or spread over ranks whole (expert parallel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from parallel_llm import (
    LIMITS,
    SIZES,
    assert_block_0_untouched,
    params,
    poison,
    prompts,
)
from replicas import tokens_of
from tiny_models import TINY_MIXTURES, save_tiny
from workers import GlooPool

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ConfigError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
REPLICAS = {"data_parallel_size": 2, "enable_expert_parallel": True}
Load = dict[int, list[int]]


@dataclass
class Outcome:
    """Tokens of many requests and of one alone, the experts' load, and how the steps ran."""

    many: list[list[int]]
    one: list[list[int]]
    load: Load
    modes: set[str]
    weights: tuple[int, int]  # experts on this rank, and their width


def run(path: str, mode: str, options: dict[str, Any]) -> Outcome:
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else SIZES)
    settings = LIMITS | {"graphs": graphs, "enable_prefix_caching": False, "rank_timeout_s": 30.0}
    with LLM(path, **settings | options) as llm:
        runner: Any = llm.engine.runner
        poison(runner)
        modes: set[str] = set()
        record = runner.stats.record
        runner.stats.record = lambda choice, n: (
            modes.add(choice.mode.name),
            record(choice, n),
        )
        assert not any(map(any, llm.expert_load().values()))  # captures count nothing
        many = tokens_of(llm.generate(prompts(), params()))
        one = tokens_of(llm.generate([[5, 6, 7, 8, 9]], GREEDY))  # a replica has no work
        load = llm.expert_load(reset=True)
        assert not any(map(any, llm.expert_load().values()))
        assert_block_0_untouched(runner)
        mixture = next(layer.mixture for layer in runner.model.decoder_layers() if layer.mixture)
        num_experts, _, width = mixture.down.shape
        return Outcome(many, one, load, modes, (num_experts, width))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Outcome]]:
    made: dict[str, tuple[str, Outcome]] = {}

    def make(name: str) -> tuple[str, Outcome]:
        if name not in made:
            path = str(save_tiny(TINY_MIXTURES[name](), tmp_path_factory.mktemp(name)))
            made[name] = path, run(path, "NONE", {})
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("qwen2_moe", "FULL_AND_PIECEWISE", {"tensor_parallel_size": 2}),
        ("qwen3_moe", "FULL", REPLICAS),
        ("qwen3_moe", "PIECEWISE", REPLICAS),
        ("qwen2_moe", "FULL_AND_FULL", REPLICAS),
        ("gpt_oss", "NONE", REPLICAS),
        ("glm4_moe", "FULL", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v2", "FULL_AND_FULL", {"tensor_parallel_size": 2}),
        ("deepseek_v3", "FULL_AND_PIECEWISE", REPLICAS),
    ],
)
def test_tokens_and_load(
    gloo_pool: GlooPool, reference: Any, name: str, mode: str, options: dict[str, Any]
) -> None:
    path, expected = reference(name)
    for outcome in gloo_pool.run(run, path, mode, options):
        assert outcome.many == expected.many
        assert outcome.one == expected.one
        assert outcome.load == expected.load
        num_experts, width = expected.weights
        half = (num_experts, width // 2)
        if "enable_expert_parallel" in options:
            half = (num_experts // 2, width)
        assert outcome.weights == half
        assert outcome.modes & set(mode.split("_")) or outcome.modes == {mode}


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_tokens_split_over_ranks(gloo_pool: GlooPool, reference: Any, name: str) -> None:
    """Each rank runs its tokens through whole experts, or all of them through its slices."""
    path, expected = reference(name)
    options = {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 2}
    for outcome in gloo_pool.run(run, path, "FULL_AND_PIECEWISE", options):
        assert (outcome.many, outcome.one) == (expected.many, expected.one)
        assert outcome.load == expected.load


def test_replicas_of_two_ranks(gloo_pool: GlooPool, reference: Any) -> None:
    """Experts over all four ranks; each replica splits attention over two."""
    path, expected = reference("mixtral")
    options = {**REPLICAS, "tensor_parallel_size": 2, "async_scheduling": True}
    for outcome in gloo_pool.run(run, path, "FULL", options, world_size=4):
        assert (outcome.many, outcome.one) == (expected.many, expected.one)
        assert outcome.load == expected.load
        assert outcome.weights[0] == expected.weights[0] // 4


def refused(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="experts cannot be spread evenly over 4 ranks"):
        LLM(path, **LIMITS | options)


def test_experts_that_cannot_be_spread(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference("qwen2_moe")  # six
    gloo_pool.run(refused, path, {**REPLICAS, "data_parallel_size": 4}, world_size=4)
