"""The graphs of one callable under one state of torch's switches: captured, tried, replayed.

``graphed()`` creates a set when it first needs it. Each number of rows is compared with an eager
call once before its results are trusted; ``trial`` describes what that shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ostinato.errors import BatchError, ReplayMismatchError
from ostinato.graphs.backends.ambient import among_captures
from ostinato.graphs.capture.buffers import storage_id
from ostinato.graphs.capture.call_layout import CallLayout
from ostinato.graphs.capture.capture_loop import CaptureLoop, CaptureReport
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.output_layout import OutputLayout
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.graphs.tree import map_tensors
from ostinato.graphs.trust.argument_watch import ArgumentWatch
from ostinato.graphs.trust.comparison import Agreement
from ostinato.graphs.trust.ledger.ledger import HeldGraph
from ostinato.graphs.trust.ledger.owners import (
    MemoryKind,
    NamedMemory,
    OwnedMemory,
    module_memory,
    state_memory,
)
from ostinato.graphs.trust.rehearsal import Rehearsal
from ostinato.graphs.trust.trial import CapturedSize, Trial
from ostinato.graphs.trust.trial_record import TrialRecord
from ostinato.graphs.trust.watched_state import WatchedState

logger = logging.getLogger(__name__)

_MOST_ADDRESSES = 1000  # remembered


@dataclass(frozen=True, kw_only=True)
class GraphSetOptions:
    """The options of ``graphed()`` that concern its graphs; documented there."""

    mode: CUDAGraphMode
    num_warmups: int
    eager_fallback: bool
    verify: bool
    watch: bool  # check the state that the callable refers to, in captures and calls
    show_progress: bool


class GraphSet:
    """Owns graphs in ``pool``, over the buffers of ``layout``. For one thread at a time."""

    def __init__(
        self,
        function: Callable[..., Any],
        layout: CallLayout,
        pool: GraphPool,
        plan: CapturePlan,
        options: GraphSetOptions,
    ) -> None:
        self._function = function
        self._layout = layout
        self._pool = pool
        self._options = options
        self.dispatcher = Dispatcher(plan)
        self.report = CaptureReport()
        self._graphs: dict[BatchDescriptor, CapturedSize] = {}
        self._watched: WatchedState | None = None  # state that the callable refers to
        # State that it writes in place: arguments by position, and other memory, kept alive
        # because graphs write it and so that no argument of a later call takes its number.
        self._written: set[int] = set()
        self._written_state: dict[int, torch.Tensor] = {}
        self._read_state: frozenset[int] = frozenset()  # memory that it refers to
        self._owned: OwnedMemory | None = None  # where all of it was at the first capture
        # Addresses of written arguments outside the pool, since this capture of the pool.
        self._outside: set[int] = set()
        self._outside_since = 0
        # Results of trials.
        self._outputs: OutputLayout | None = None
        self._trials = TrialRecord(layout)
        self._refused: dict[tuple[int, int], Choice] = {}
        pool.register(self)

    # --- one call ------------------------------------------------------------------------------

    def choose(self, rows: int) -> Choice:
        choice = self.dispatcher.dispatch(BatchShape(rows, rows, 1))
        if self._refused:
            return self._refused.get((choice.padded_num_tokens, rows), choice)
        return choice

    def check_state(self) -> None:
        """Raise if a weight moved, or a value that graphs hold has changed."""
        if self._watched is not None:
            self._watched.check()

    def changed_values(self) -> list[str]:
        """Names of plain values that are other than at capture; called before a run."""
        return [] if self._watched is None else self._watched.plain_changes()

    def note_own_changes(self, before: Sequence[str]) -> list[str]:
        """After a run, stop watching the plain values that the callable sets itself.

        Returns their names. ``before``: what had been changed before it, by others.
        """
        changed = [name for name in self.changed_values() if name not in before]
        if changed and self._watched is not None:
            self._watched = self._watched.without(changed)
        return changed

    def run(
        self, choice: Choice, rows: int, values: Sequence[Any], call: tuple[Any, Any]
    ) -> tuple[Any, Choice]:
        """Replay the chosen graph; return its result and the choice that actually ran.

        ``values``: the leaves of ``call``, which is (args, kwargs).
        """
        size = choice.padded_num_tokens
        if self._written or self._written_state:
            self._layout.check_separate(
                values, self._written, self._written_state, self._read_state
            )
        graph = self._graphs[choice.descriptor]
        if (size, rows) not in self._trials.trusted and self._needs_trial(rows, size):
            return self._try(graph, choice, rows, values, call)
        self._replay(graph, size, values)
        return self._cut(graph, rows, size), choice

    def _needs_trial(self, rows: int, size: int) -> bool:
        """Whether to compare with an eager call. Without ``verify``, only to locate the rows."""
        return self._options.verify or (rows < size and self._outputs is None)

    def _replay(self, graph: CapturedSize, size: int, values: Sequence[Any]) -> None:
        self._layout.fill(values, size)
        self._pool.replay(graph.tape)
        if self._written:
            # Not to an earlier result of the pool: this replay may have put its own there.
            written = [i for i in self._written if not self._is_in_pool(values[i])]
            self._layout.write_back(values, size, written)

    def _is_in_pool(self, value: torch.Tensor) -> bool:
        """Whether an argument is in the pool's memory. Asks the backend once per address: on CUDA
        the answer takes as long as a small replay, and changes only when the pool captures."""
        if self._outside_since != self._pool.serial or len(self._outside) > _MOST_ADDRESSES:
            self._outside_since = self._pool.serial
            self._outside.clear()
        address = value.data_ptr()
        if address in self._outside:
            return False
        if self._pool.backend.owns(value):
            return True
        self._outside.add(address)
        return False

    def _cut(self, graph: CapturedSize, rows: int, size: int) -> Any:
        if rows == size:
            # Containers are copied even if nothing is cut: the caller may change them.
            bare = isinstance(graph.output, torch.Tensor)
            return graph.output if bare else map_tensors(_itself, graph.output)
        assert self._outputs is not None, "found by the trial of these rows"
        return self._outputs.cut(graph.output, rows)

    # --- trials --------------------------------------------------------------------------------

    @leaving_as_found
    @among_captures()
    def _try(
        self,
        graph: CapturedSize,
        choice: Choice,
        rows: int,
        values: Sequence[Any],
        call: tuple[Any, Any],
    ) -> tuple[Any, Choice]:
        """Run the first call of a number of rows both eagerly and by replay, and compare.

        The call takes effect once, or not at all if it is refused.
        """
        size = choice.padded_num_tokens
        before = self.changed_values()
        trial = Trial(self._function, self._layout, self._pool, graph, call, rows=rows, size=size)
        try:
            own_changes = self.note_own_changes(before)
            agreement = self._compare(trial, own_changes, rows, size)
        except BaseException as error:
            trial.undo()
            if not isinstance(error, BatchError):
                raise
            self._raise_if_replaced(error)
            if not self._options.eager_fallback:
                raise
            logger.warning("%s; batches of %d run eagerly", error, rows)
            eager = _eager_choice(rows, Reason.DIFFERS_FROM_EAGER)
            self._refused[size, rows] = eager
            return trial.eager_result(), eager
        if agreement is not Agreement.SAME:
            return trial.eager_result(), _eager_choice(rows, Reason.UNVERIFIED)
        trial.undo()
        self._replay(graph, size, trial.values)
        return self._cut(graph, rows, size), choice

    def _raise_if_replaced(self, error: BaseException) -> None:
        """Raise what explains ``error``, if it is state that was replaced since the capture."""
        if self._watched is not None:
            try:
                self._watched.raise_if_replaced()
            except ReplayMismatchError as explanation:
                raise explanation from error

    def _compare(self, trial: Trial, own_changes: Sequence[str], rows: int, size: int) -> Agreement:
        trial.replay(self._written)
        if rows < size:
            outputs = trial.infer_layout()
            if self._outputs is not None and self._outputs != outputs:
                raise BatchError(
                    f"the result of {rows} rows follows the batch in other dimensions than that of "
                    "earlier batches; return results with one layout, or use separate graphed()s"
                )
            self._outputs = outputs
        if not self._options.verify:
            self._trials.trusted.add((size, rows))
            return Agreement.SAME
        agreement = trial.compare(self._outputs, self._watched)
        if own_changes:
            trial.check_does_not_read(own_changes)
        if agreement is Agreement.SAME:
            self._trials.passed(rows, size, trial)
        else:
            self._trials.unclear(rows, size)
        return agreement

    # --- capture -------------------------------------------------------------------------------

    def missing(self) -> list[PlanEntry]:
        entries = self.dispatcher.plan.entries
        return [entry for entry in entries if self.dispatcher.is_open(entry)]

    def entry_for(self, rows: int) -> PlanEntry:
        entries = self.dispatcher.plan.entries
        fitting = [entry for entry in entries if entry.descriptor.num_tokens >= rows]
        return min(fitting, key=lambda entry: entry.descriptor.num_tokens)

    def capture(self, entries: Iterable[PlanEntry], values: Sequence[Any], name: str) -> None:
        """Capture with rows like ``values``. The callable's writes are undone afterwards."""
        loop = CaptureLoop(
            self._pool,
            self.dispatcher,
            eager_fallback=self._options.eager_fallback,
            show_progress=self._options.show_progress,
            name=name,
            describe=lambda entry: f"size {entry.descriptor.num_tokens}",
        )
        with loop:
            for entry in loop.over(entries):
                try:
                    self._capture_one(entry, values)
                except BaseException as error:
                    loop.failed(entry, error)
                else:
                    loop.succeeded(entry)
        self.report.entries.extend(loop.report.entries)

    @among_captures()
    def _capture_one(self, entry: PlanEntry, values: Sequence[Any]) -> None:
        size = entry.descriptor.num_tokens
        self._layout.fill_repeated(values, size)
        call = partial(self._call_once, size)
        before = self.changed_values()
        watch = self._watch if self._options.watch else None
        rehearsal = Rehearsal(self._function, call, watch=watch, generators=self._pool.generators)
        try:
            with self._pool.backend.capture_scope():
                rehearsal.run(thoroughly=not self._graphs)
                for _ in range(self._options.num_warmups):
                    call()
            captured = self._pool.capture(
                lambda: self._apart_from_buffers(call()),
                split_at_breaks=self._options.mode is CUDAGraphMode.PIECEWISE,
            )
            rehearsal.check_nothing_replaced()
            rehearsal.effects.restore()
        except BaseException:
            rehearsal.put_back_names()
            rehearsal.effects.restore()
            raise
        written = rehearsal.effects.written
        self._written |= set(self._layout.written_by(written))
        buffers = self._layout.storages
        self._written_state |= {key: written[key] for key in written.keys() - buffers}
        if self._watched is not None:
            self.note_own_changes(before)
            # One size may have replaced state that other graphs read.
            self._watched.raise_if_replaced()
        elif self._options.watch:
            self._watched = self._watch()
            self._read_state = self._watched.storages
        if self._owned is None:
            watched = () if self._watched is None else self._watched.tensors()
            self._owned = OwnedMemory(self._named_memory, self._all_memory(watched))
        if self._options.verify:
            self._trials.captured(size, values)
        output = self._pool.weak(captured.output)
        self._graphs[entry.descriptor] = CapturedSize(tape=captured.tape, output=output)

    def _call_once(self, size: int) -> Any:
        args, kwargs = self._layout.static_call(size)
        watch = ArgumentWatch(self._layout.named(args, kwargs))
        result = self._function(*args, **kwargs)
        try:
            watch.check()
        finally:
            watch.put_back()  # static arguments are the caller's
        return result

    def _apart_from_buffers(self, result: Any) -> Any:
        """Copy results that are arguments: the next call overwrites their buffers."""
        buffers = self._layout.storages
        return map_tensors(lambda t: t.clone() if storage_id(t) in buffers else t, result)

    def _watch(self) -> WatchedState:
        in_breaks = self._options.mode is not CUDAGraphMode.PIECEWISE
        arguments = self._layout.callables
        return WatchedState(self._function, arguments=arguments, in_breaks=in_breaks)

    # --- looking, and letting go ---------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        return sum(len(graph.tape.graphs) for graph in self._graphs.values())

    def tapes(self) -> list[tuple[str, Tape]]:
        """The captured graphs, by name."""
        sizes = self._graphs.items()
        return [(f"size {key.num_tokens}", captured.tape) for key, captured in sizes]

    def held_graphs(self) -> list[HeldGraph]:
        """The captured graphs, for a ledger."""
        memory, owned = self._pool.backend, self._owned
        assert owned is not None or not self._graphs, "named at the first capture"
        return [
            HeldGraph(name=name, capture=tape, owned=owned, memory=memory)
            for name, tape in self.tapes()
            if owned is not None
        ]

    def _named_memory(self) -> Iterator[NamedMemory]:
        return self._all_memory(() if self._watched is None else self._watched.tensors_now())

    def _all_memory(self, state: Iterable[tuple[str, torch.Tensor]]) -> Iterator[NamedMemory]:
        """The memory of the callable, as far as it is watched, and of its arguments."""
        if not self._options.watch and isinstance(self._function, torch.nn.Module):
            yield from module_memory(self._function)
        yield from state_memory(state)
        for name, tensor in self._layout.named_tensors():
            yield NamedMemory(MemoryKind.INPUT, name, tensor)

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these serial numbers."""
        for descriptor, graph in list(self._graphs.items()):
            if graph.tape.serial in serials:
                self._graphs.pop(descriptor).tape.close()

    def clear_graphs(self) -> None:
        """Drop all graphs and the results of their trials."""
        try:
            close_each(graph.tape.close for graph in self._graphs.values())
        finally:
            self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self.dispatcher.reset()
        self._watched = self._owned = None
        self._written, self._written_state = set(), {}
        self._read_state = frozenset()
        self._outputs = None
        self._trials.clear()
        self._refused.clear()


def _eager_choice(rows: int, reason: Reason) -> Choice:
    return Choice(mode=CUDAGraphMode.NONE, descriptor=BatchDescriptor(rows), reason=reason)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
