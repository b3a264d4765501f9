"""A second form of the model for small batches: which runners can have one, the graphs of both."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.config import GraphConfig
from ostinato.errors import ConfigError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.models.base import CausalLM
from ostinato.parallel.agreement import Reducer
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.step_memory import StepMemory


@dataclass(frozen=True, kw_only=True)
class SmallBatchModel:
    """Another form of the model, for batches of up to ``threshold`` tokens before padding.

    It stores keys and values in the same layout as the first, and uses the first's head.
    """

    model: CausalLM
    plan: CapturePlan
    threshold: int
    name: str


def check_can_agree(
    agreement: Reducer | None,
    graphs: GraphConfig,
    small: SmallBatchModel | None,
) -> None:
    """Raise for what ranks that step together cannot have."""
    if agreement is None:
        return
    ranks = f"{agreement.size} ranks that step together"
    if graphs.eager_fallback:
        raise ConfigError(
            f"eager_fallback does not work with {ranks}: a rank that lacks a graph cannot run the "
            "mode they agree on; leave it off"
        )
    if small is not None:
        raise ConfigError(
            f"a {small.name} for small batches does not work with {ranks}: they would run "
            "different models"
        )


def graphs_of_forms(
    model: CausalLM,
    plan: CapturePlan,
    small: SmallBatchModel | None,
    *,
    memory: StepMemory,
    pool: GraphPool,
    graphs: GraphConfig,
    show_progress: bool,
    name: str,
    num_ranks: int | None,
) -> list[ModelGraphs]:
    """By ``Choice.model``: the model's, then those of the small-batch model if there is one."""
    forms = [(model, plan, name)]
    if small is not None:
        forms.append((small.model, small.plan, small.name))
    return [
        ModelGraphs(
            form,
            its_plan,
            head=model,
            memory=memory,
            pool=pool,
            graphs=graphs,
            show_progress=show_progress,
            name=its_name,
            index=index,
            num_ranks=num_ranks,
        )
        for index, (form, its_plan, its_name) in enumerate(forms)
    ]
