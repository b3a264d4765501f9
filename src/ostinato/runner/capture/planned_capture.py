"""``PlannedCapture``: captures the graphs of a runner's plans, and counts what they take.

It decides which entries are captured with how much memory reserved. How one is captured is up to
``ModelGraphs``; when, and on which ranks, up to the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from ostinato.attention.base import AttentionMetadata
from ostinato.errors import CaptureError
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.graph_memory import GraphMemory, GraphMemoryReport
from ostinato.graphs.policy.next_capture import most_wanted
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.runner.capture.measured_capture import measured_capture, warn_of_no_capture
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.steps.execution import StepExecution
from ostinato.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

# Memory of a decode step beside its logits: hidden states, and what the sampler needs.
BESIDE_LOGITS = 8 * 2**20


class CapturingRunner(Protocol):
    """What a capture asks of the runner: it overwrites the buffers of its steps."""

    has_other_ranks: bool
    execution: StepExecution

    def follow_stream(self) -> None:
        """Order what follows after the previous step, if that ran on another stream."""

    def forget_rows(self) -> None:
        """Make the next decode step write its rows again."""

    def set_batch(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Put a batch that is in the state into the buffers."""


class PlannedCapture:
    """Captures entries of the plans of ``all_graphs`` into ``pool``.

    ``all_graphs`` are by ``Choice.model`` and share ``buffers`` and pool. The runner is passed to
    each call and not kept, so that it is freed with its last reference. ``report``: of all entries
    since the last ``clear_graphs``; ``num_bytes``: what those took. ``memory``: the same by what
    takes it, beside its estimate.
    """

    def __init__(
        self,
        all_graphs: Sequence[ModelGraphs],
        buffers: InputBuffers,
        pool: GraphPool,
        ledger: Ledger,
        memory: GraphMemoryReport,
    ) -> None:
        self._all_graphs = all_graphs
        self._buffers = buffers
        self._pool = pool
        self._ledger = ledger
        self.memory = memory
        self.report = CaptureReport()
        self.num_bytes = 0

    @property
    def is_needed(self) -> bool:
        """Whether a graph of the plans is neither captured nor refused."""
        return any(graphs.needs_capture() for graphs in self._all_graphs)

    def capture_missing(self, runner: CapturingRunner) -> int:
        """Capture every missing graph of the plans; return the bytes it took."""
        missing = [graphs for graphs in self._all_graphs if graphs.needs_capture()]
        if not missing:
            num_planned = sum(len(graphs.plan.entries) for graphs in self._all_graphs)
            warn_of_no_capture(num_planned, self._all_graphs[0].plan.mode)
            return 0
        largest = max(graphs.largest_tensor() for graphs in missing) + BESIDE_LOGITS
        wanted = [(graphs, None) for graphs in missing]
        capture = partial(self._capture, runner, wanted, reserve=largest)
        taken = measured_capture(capture, self._pool)
        self._add_taken(taken)
        return taken.total

    def most_wanted(self, shapes: Mapping[tuple[bool, int], int]) -> tuple[int, int] | None:
        """The model and index of the missing entry for the most batches of ``shapes``, if any."""
        for model, graphs in reversed(list(enumerate(self._all_graphs))):  # small batches first
            entry = most_wanted(graphs.plan, graphs.missing, shapes)
            if entry is not None:
                return model, graphs.plan.entries.index(entry)
        return None

    def capture_entry(self, runner: CapturingRunner, model: int, index: int) -> None:
        """Capture one entry of a model's plan. If that fails, its batches go on to run eagerly."""
        graphs = self._all_graphs[model]
        entry, reserve = graphs.plan.entries[index], None
        if not self.memory.taken.pool:
            # A larger graph may follow any smaller one: have room for all of them, in one block.
            largest = max(each.largest_tensor() for each in self._all_graphs) + BESIDE_LOGITS
            reserve = max(largest, self.memory.estimated.pool)
        capture = partial(self._capture, runner, [(graphs, entry)], reserve=reserve)
        try:
            taken = measured_capture(capture, self._pool)
        except CaptureError as error:
            if runner.has_other_ranks:
                raise  # they have this graph
            graphs.refuse(entry)
            logger.warning("%s; its batches go on to run eagerly", error)
            return
        self._add_taken(taken)

    def clear_graphs(self, others: Sequence[Callable[[], None]]) -> None:
        """Drop all graphs in the pool, then ``others``, which are outside of it."""
        self.report, self.num_bytes = CaptureReport(), 0
        self.memory = replace(self.memory, taken=GraphMemory())
        close_each([self._pool.clear_all_graphs, *others, self._pool.release_unused])

    def _capture(
        self,
        runner: CapturingRunner,
        wanted: Sequence[tuple[ModelGraphs, PlanEntry | None]],
        *,
        reserve: int | None,
    ) -> CaptureReport:
        """Capture one entry of each, or all that are missing; the pool first gets a block."""
        runner.follow_stream()
        runner.forget_rows()
        if reserve is not None:
            self._pool.reserve(reserve)
        report = CaptureReport()
        new = [(graphs, graphs.missing if one is None else [one]) for graphs, one in wanted]
        for graphs, entry in wanted:
            self._buffers.reset()
            captured = graphs.capture(entry)
            report.entries += captured.entries
            report.buffer_bytes += captured.buffer_bytes
        for graphs, entries in new:
            runner.execution.try_captured(graphs, entries, runner.set_batch)
        runner.forget_rows()
        self.report.entries += report.entries
        self.report.buffer_bytes = report.buffer_bytes
        return report

    def _add_taken(self, more: GraphMemory) -> None:
        self.num_bytes += more.total
        taken = self.memory.taken.with_more(more)
        communicator = self.memory.estimated.communicator  # connected before
        taken = replace(taken, communicator=communicator)
        self.memory = replace(self.memory, taken=taken)
        self._ledger.update()
