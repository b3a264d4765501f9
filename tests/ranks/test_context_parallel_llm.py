"""``LLM`` with the KV cache of a request split over gloo processes, against ``LLM`` in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_llm import LIMITS, Outcome, blocks_of, params, prompts, run_llm
from sharded_steps import config_of
from transformers import AutoModelForCausalLM
from workers import GlooPool

from ostinato import LLM

pytestmark = pytest.mark.slow


def call(path: str, mode: str, options: dict[str, Any]) -> Outcome:
    return run_llm(path, mode, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, Outcome]]:
    """A checkpoint with this many KV heads, and one process's eager results for it."""

    @cache
    def make(num_kv_heads: int) -> tuple[str, Outcome]:
        torch.manual_seed(num_kv_heads)
        model: Any = AutoModelForCausalLM.from_config(config_of("llama", num_kv_heads))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        path: Path = tmp_path_factory.mktemp(f"dcp-{num_kv_heads}")
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.save_pretrained(path)
        return str(path), run_llm(str(path), "NONE")

    return make


@pytest.mark.parametrize(
    ("num_kv_heads", "tp", "dcp", "interleave", "mode", "options"),
    [
        (1, 2, 2, 1, "FULL_AND_PIECEWISE", {}),
        (1, 2, 2, 4, "FULL", {"async_scheduling": True}),
        (2, 4, 2, 2, "FULL_AND_FULL", {}),
        (1, 4, 4, 1, "FULL_AND_PIECEWISE", {}),
    ],
)
def test_tokens_equal_those_of_one_process(
    gloo_pool: GlooPool,
    reference: Callable[[int], tuple[str, Outcome]],
    num_kv_heads: int,
    tp: int,
    dcp: int,
    interleave: int,
    mode: str,
    options: dict[str, Any],
) -> None:
    path, expected = reference(num_kv_heads)
    few = blocks_of(20 // dcp + 1, num_kv_heads=1, head_dim=8, num_layers=2)
    options = {
        **options,
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "dcp_kv_cache_interleave_size": interleave,
        "kv_cache_memory_bytes": few,  # for 1 / dcp of the tokens
    }
    outcomes = gloo_pool.run(call, path, mode, options, world_size=tp)
    for outcome in outcomes:
        assert outcome.tokens == expected.tokens
        assert outcome.reasons == expected.reasons
        if mode != "NONE":
            assert ("base", "FULL") in outcome.steps
    assert outcomes[0].num_preemptions > 0


def with_replicas(path: str) -> list[list[int]]:
    sizes = {f"{kind}_parallel_size": 2 for kind in ("tensor", "decode_context", "data")}
    with LLM(path, **(LIMITS | {"rank_timeout_s": 20.0} | sizes)) as llm:
        outputs = llm.generate(prompts(), params())
        return [output.outputs[0].token_ids for output in outputs]


def test_each_replica_splits_its_own_cache(
    gloo_pool: GlooPool, reference: Callable[[int], tuple[str, Outcome]]
) -> None:
    path, expected = reference(1)
    assert gloo_pool.run(with_replicas, path, world_size=4) == [expected.tokens] * 4
