"""Runs the steps that are compared, both ways, and quarantines graphs that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.shadow.memory_names import name_among
from ostinato.graphs.trust.shadow.report import Mismatch, VerifyReport
from ostinato.graphs.trust.shadow.schedule import ShadowSchedule
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep, observe_captures
from ostinato.runner.memory_names import RunnerMemory
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.verify.both_ways import BothWays
from ostinato.scheduling.step_plan import StepPlan

Key = tuple[int, CUDAGraphMode, BatchDescriptor]


class StepShadow:
    """Compares steps of one runner with eager runs, as ``policy`` says.

    Every step must ask ``takes`` once, so that ranks that run the same steps compare the same
    ones.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        memory: StepMemory,
        all_graphs: Sequence[ModelGraphs],
        samplers: SamplerGraphs,
        pool: GraphPool,
        *,
        ledger: Ledger,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._schedule = ShadowSchedule(policy)
        self.report = VerifyReport()
        self._memory = memory
        self._all_graphs = all_graphs
        self._samplers = samplers
        self._agree = agree
        owners = RunnerMemory([graphs.model for graphs in all_graphs], memory)
        self._name_of = partial(_name_in, owners)
        self._ledger = ledger
        self._shadow = self._shadow_of(pool)
        self.steps = BothWays(memory, all_graphs, pool)
        samplers.observe = observe_captures

    def _shadow_of(self, pool: GraphPool) -> Shadow:
        # Nothing here refers to this object: a dropped engine must be freed at once.
        return Shadow(
            pool,
            name_of=self._name_of,
            ledger=self._ledger,
            agree=self._agree,
            report=self.report,
        )

    # --- which steps ---------------------------------------------------------------------------

    @property
    def policy(self) -> VerifyPolicy:
        return self._schedule.policy

    def takes(self, choice: Choice) -> bool:
        """Whether the step that runs as chosen is compared; counts it."""
        return self._schedule.takes(_key(choice))

    def takes_sampler(self, graph: SamplerGraph) -> bool:
        """Whether the full sampler of this step, if it is a graph, is compared."""
        if graph.tape is None:
            return False
        first = self.policy.at_capture and not graph.is_compared
        return first or self._schedule.samples_this

    # --- steps of the service ------------------------------------------------------------------

    def decode(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> torch.Tensor:
        """Run a decode step both ways; returns its logits, padding included."""
        step, logits = self.steps.decode_step(plan, choice, across)
        self._run(step, choice)
        return logits[0]

    def hidden_states(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the forward of a mixed batch both ways; returns its hidden states."""
        step, hidden = self.steps.mixed_step(plan, choice, metadata, across)
        self._run(step, choice)
        return hidden[0]

    def sampler(self, graph: SamplerGraph, req_indices: Sequence[int]) -> None:
        """Run the full sampler both ways."""
        pool = self._samplers.pool
        assert pool is not None, "the graph is in it"
        step = self.steps.sampler_step(self._samplers, graph, req_indices)
        graph.is_compared = True
        self._samplers.stats.replays += 1
        if self._shadow_of(pool).run(step, self._step) is not None:
            self._samplers.quarantine(graph)

    @property
    def _step(self) -> str:
        return f"step {self._schedule.num_steps}"

    def _run(self, step: ShadowedStep, choice: Choice) -> None:
        self.note(self.compare(step, self._step), choice)

    def compare(self, step: ShadowedStep, found: str) -> Mismatch | None:
        """``Shadow.run``, for graphs of the model."""
        return self._shadow.run(step, found)

    def check_row(
        self,
        step: ShadowedStep,
        change_others: AbstractContextManager[None],
        rows: Mapping[int, slice],
        found: str,
    ) -> Mismatch | None:
        """``Shadow.check_row``, for graphs of the model."""
        return self._shadow.check_row(step, change_others, rows, found)

    def note(self, mismatch: Mismatch | None, choice: Choice) -> None:
        """Quarantine the graph if there is a ``mismatch``; otherwise it is trusted again."""
        self._schedule.note(_key(choice), differs=mismatch is not None)
        if mismatch is not None:
            self._all_graphs[choice.model].quarantine(choice)


def _name_in(owners: RunnerMemory, address: int) -> str | None:
    return name_among(owners.named_memory(), address)


def _key(choice: Choice) -> Key | None:
    if choice.mode is CUDAGraphMode.NONE:
        return None
    return choice.model, choice.mode, choice.descriptor
