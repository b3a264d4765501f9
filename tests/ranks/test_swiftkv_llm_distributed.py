"""SwiftKV in ``LLM`` over gloo processes against ``LLM`` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_llm import LIMITS, SIZES, Outcome, run_llm
from sharded_steps import config_of
from transformers import AutoModelForCausalLM
from workers import GlooPool

from ostinato import LLM, GraphConfig

pytestmark = pytest.mark.slow
EARLY, LAYERS = 2, 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Outcome]:
    """A plain checkpoint, and one process's eager results for it as SwiftKV."""
    torch.manual_seed(0)
    config = config_of("llama", 2)
    config.num_hidden_layers = LAYERS
    config.eos_token_id = None
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    path: Path = tmp_path_factory.mktemp("plain")
    model.save_pretrained(path)
    outcome = run_llm(str(path), "NONE", swiftkv_layers=EARLY)
    assert outcome.tokens != run_llm(str(path), "NONE").tokens
    return str(path), outcome


def call(path: str, mode: str, options: dict[str, Any]) -> Outcome:
    return run_llm(path, mode, swiftkv_layers=EARLY, **options)


# With both SP and TP and no threshold, only the late layers need the group of all ranks.
@pytest.mark.parametrize(
    ("sp", "tp", "threshold", "mode"),
    [
        (1, 2, None, "FULL_AND_PIECEWISE"),
        (2, 1, None, "PIECEWISE"),
        (2, 1, 2, "FULL_AND_PIECEWISE"),
        (2, 1, 2, "FULL_AND_FULL"),
        (2, 2, None, "NONE"),
    ],
)
def test_tokens_equal_those_of_one_process(
    gloo_pool: GlooPool,
    reference: tuple[str, Outcome],
    sp: int,
    tp: int,
    threshold: int | None,
    mode: str,
) -> None:
    path, expected = reference
    options: dict[str, Any] = {"tensor_parallel_size": tp, "ulysses_sequence_parallel_size": sp}
    if threshold is not None:
        options["shift_parallel_threshold"] = threshold
    for outcome in gloo_pool.run(call, path, mode, options, world_size=sp * tp):
        assert outcome.tokens == expected.tokens
        assert outcome.reasons == expected.reasons
        assert {model for model, _ in outcome.steps} == (
            {"base", "shift"} if threshold else {"base"}
        )
        assert {mode, mode.partition("_")[0]} & {how for _, how in outcome.steps}


def shift_sizes(path: str) -> list[list[int]]:
    """The base model's and the shift model's."""
    with LLM(
        path,
        swiftkv_layers=EARLY,
        ulysses_sequence_parallel_size=2,
        shift_parallel_threshold=3,
        graphs=GraphConfig(capture_sizes=SIZES),
        **LIMITS,
    ) as llm:
        runner = llm.engine.runner
        plans = [graphs.plan for graphs in (runner.graphs, runner.small_graphs)]
        return [sorted({e.descriptor.num_tokens for e in plan.entries}) for plan in plans]


def test_the_shift_model_has_graphs_of_all_sizes(
    gloo_pool: GlooPool, reference: tuple[str, Outcome]
) -> None:
    for sizes in gloo_pool.run(shift_sizes, reference[0]):
        assert sizes == [[4, 8, 24], [1, 2, 4, 12]]
