"""Runs steps through their graphs and compares some of them with eager runs (``verify``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.manager import FullGraph
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.runner.ambient import without_autocast
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.steps.execution import SetBatch, StepExecution
from ostinato.runner.verify.step_shadow import StepShadow
from ostinato.runner.verify.trials import try_graphs
from ostinato.scheduling.step_plan import IntArray, StepPlan


class VerifiedExecution(StepExecution):
    """Compares the steps that ``policy`` picks.

    ``agree``: whether it holds on any of the ranks that run the same steps; None: one rank.
    """

    replays_directly = False

    def __init__(
        self,
        memory: StepMemory,
        all_graphs: Sequence[ModelGraphs],
        samplers: SamplerGraphs,
        pool: GraphPool,
        ledger: Ledger,
        *,
        policy: VerifyPolicy,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        super().__init__(memory, all_graphs, samplers, pool, ledger)
        self._memory = memory
        self._shadow = StepShadow(
            policy, memory, all_graphs, samplers, pool, ledger=ledger, agree=agree
        )
        self.report = self._shadow.report

    @without_autocast
    def decode(
        self,
        graph: FullGraph | None,
        plan: StepPlan,
        choice: Choice,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._shadow.takes(choice):
            return self._shadow.decode(plan, choice, across)
        return super().decode(graph, plan, choice, across)

    def hidden_states(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._shadow.takes(choice):
            return self._shadow.hidden_states(plan, choice, metadata, across)
        return super().hidden_states(plan, choice, metadata, across)

    @without_autocast
    def sample(self, graph: SamplerGraph, req_indices: list[int] | IntArray) -> None:
        if self._shadow.takes_sampler(graph):
            self._shadow.sampler(graph, [int(row) for row in req_indices])
        else:
            super().sample(graph, req_indices)

    def try_captured(
        self, graphs: ModelGraphs, entries: Sequence[PlanEntry], set_batch: SetBatch
    ) -> None:
        if self._shadow.policy.at_capture:
            self._memory.buffers.reset()
            try_graphs(graphs, entries, self._shadow, self._memory, set_batch)
            self._memory.buffers.reset()
