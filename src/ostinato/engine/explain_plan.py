"""What an engine would capture, and which batches would run eagerly, without loading a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.explain import all_captured, plan_for
from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.runner.startup.graph_plans import GraphPlans


def explain_plan(config: EngineConfig) -> dict[str, Any]:
    """The mode, the sizes, and how batches of every size run once all of it is captured.

    ``batches``: ranges of requests that decode, and of tokens of batches with prompts, each with
    how it runs and why; ``eager``: whether that is without a graph.
    """
    backend, _, plans = plan_for(config)
    plan, resolved = plans.model, plans.resolved
    query_len = max(plan.decode_query_lens, default=1)
    decode = (
        BatchShape(number * query_len, number, query_len)
        for number in range(1, plan.max_num_seqs + 1)
        if number * query_len <= plan.max_num_batched_tokens
    )
    # One request, in its prompt: which graph it gets depends on the number of tokens alone.
    prompts = (
        BatchShape(number, 1, number, has_prompts=True)
        for number in range(1, plan.max_num_batched_tokens + 1)
    )
    all_plans = [each for each in (plans.model, plans.shift) if each is not None]
    return {
        "requested_mode": resolved.requested.name,
        "mode_in_force": resolved.mode.name,
        "mode_changed_because": resolved.reason or "-",
        "attention": f"{backend.name}, capturable: {backend.support.name}",
        "captured_sizes": list(plan.sizes),
        "graph_keys": sum(len(each.entries) for each in all_plans),
        "batches": [
            *_ranges("requests that decode", decode, plans),
            *_ranges("tokens, with prompts", prompts, plans),
        ],
    }


def _ranges(kind: str, shapes: Iterable[BatchShape], plans: GraphPlans) -> Iterator[dict[str, Any]]:
    """Neighbouring sizes that run in the same way for the same reason, as one range."""
    dispatchers = {id(plan): all_captured(plan) for plan in (plans.model, plans.shift) if plan}
    choices = (
        (shape, dispatchers[id(plans.for_batch(shape.num_tokens))].dispatch(shape))
        for shape in shapes
    )
    for (mode, reason), same in groupby(choices, key=lambda pair: (pair[1].mode, pair[1].reason)):
        sizes = [
            shape.num_reqs if kind.startswith("requests") else shape.num_tokens for shape, _ in same
        ]
        eager = mode is CUDAGraphMode.NONE
        yield {
            "batch": f"{sizes[0]} to {sizes[-1]} {kind}"
            if len(sizes) > 1
            else f"{sizes[0]} {kind}",
            "runs": "eagerly" if eager else f"{mode.name} graph",
            "eager": eager,
            "reason": reason.value,
        }
