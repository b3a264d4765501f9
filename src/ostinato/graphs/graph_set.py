"""The graphs of one callable under one state of torch's switches: captured, tried, replayed.

``graphed()`` makes them when it first needs them. Before a result is trusted it was compared with
an eager call, once for each number of rows; see ``graphed_trial`` for what that shows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ostinato.errors import BatchError
from ostinato.graphs.capture_loop import CaptureReport, capture_entries
from ostinato.graphs.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.effects import EffectsProbe, storage_id
from ostinato.graphs.graphed_call import CallLayout
from ostinato.graphs.graphed_trial import Agreement, OutputLayout, compare, differences, same_bits
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.plan import CapturePlan, PlanEntry
from ostinato.graphs.pool import GraphPool
from ostinato.graphs.rehearsal import Rehearsal
from ostinato.graphs.segments import Tape
from ostinato.graphs.tree import leaves_with_path, map_tensors, tensors_in
from ostinato.graphs.watched_state import WatchedState

logger = logging.getLogger(__name__)

# A graph whose results are near an eager call's, but not quite, is tried again this often.
_MOST_UNCLEAR = 8
# So many trials are enough of a number of rows, even if the rows of each were all alike.
_ENOUGH_TRIALS = 3
# What padding rows are tried with: rows of the batch, and numbers to both sides of them, so that
# whatever is sorted or compared across rows comes out otherwise for one or the other.
_PADDING_NOISE = (0.0, 3.0, -3.0)


@dataclass(frozen=True, kw_only=True)
class GraphSetOptions:
    """Those options of ``graphed()`` that concern its graphs; documented there."""

    mode: CUDAGraphMode
    num_warmups: int
    eager_fallback: bool
    verify: bool
    watch: bool  # what the callable refers to, in captures and calls
    show_progress: bool


@dataclass(frozen=True, kw_only=True)
class _SizeGraph:
    tape: Tape
    output: Any


class GraphSet:
    """Owns graphs in ``pool``, over the buffers of ``layout``. One thread at a time."""

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
        self._graphs: dict[BatchDescriptor, _SizeGraph] = {}
        self._watched: WatchedState | None = None  # what the callable refers to
        # What it writes in place: arguments by position, and other memory.
        self._written: set[int] = set()
        self._written_state: frozenset[int] = frozenset()
        self._read_state: frozenset[int] = frozenset()  # memory that it refers to
        # What trials have shown.
        self._outputs: OutputLayout | None = None
        self._trusted: set[tuple[int, int]] = set()  # (size, rows)
        self._refused: dict[tuple[int, int], Choice] = {}
        self._trials: Counter[tuple[int, int]] = Counter()
        self._unclear: Counter[tuple[int, int]] = Counter()
        pool.register(self)

    # --- one call ------------------------------------------------------------------------------

    def choose(self, rows: int) -> Choice:
        choice = self.dispatcher.dispatch(BatchShape(rows, rows, 1))
        if self._refused:
            return self._refused.get((choice.padded_num_tokens, rows), choice)
        return choice

    def check_state(self) -> None:
        """Raise if a weight moved, or a value that graphs hold was changed."""
        if self._watched is not None:
            self._watched.check()

    def note_own_changes(self) -> None:
        """After the callable ran: plain values that it set itself are not watched from now on."""
        if self._watched is not None:
            self._watched = self._watched.after_a_run()

    def run(
        self, choice: Choice, rows: int, values: Sequence[Any], call: tuple[Any, Any]
    ) -> tuple[Any, Choice]:
        """Replay the chosen graph; its result, and what it turned out to run after all.

        ``values``: the leaves of ``call``, which is (args, kwargs).
        """
        size = choice.padded_num_tokens
        if self._written or self._written_state:
            self._layout.check_separate(
                values, self._written, self._written_state, self._read_state
            )
        graph = self._graphs[choice.descriptor]
        if (size, rows) not in self._trusted and self._needs_trial(rows, size):
            return self._try(graph, choice, rows, values, call)
        self._replay(graph, size, values)
        return self._cut(graph, rows, size), choice

    def _needs_trial(self, rows: int, size: int) -> bool:
        """Unverified results need none, once it is known where their rows are."""
        return self._options.verify or (rows < size and self._outputs is None)

    def _replay(self, graph: _SizeGraph, size: int, values: Sequence[Any]) -> None:
        self._layout.fill(values, size)
        self._pool.replay(graph.tape)
        if self._written:
            self._layout.write_back(values, size, self._written)

    def _cut(self, graph: _SizeGraph, rows: int, size: int) -> Any:
        if rows == size:
            # Containers are made anew even where nothing is cut: the caller may change them.
            bare = isinstance(graph.output, torch.Tensor)
            return graph.output if bare else map_tensors(_itself, graph.output)
        assert self._outputs is not None, "found by the trial of these rows"
        return self._outputs.cut(graph.output, rows)

    # --- trials --------------------------------------------------------------------------------

    def _try(
        self,
        graph: _SizeGraph,
        choice: Choice,
        rows: int,
        values: Sequence[Any],
        call: tuple[Any, Any],
    ) -> tuple[Any, Choice]:
        """The first call of a number of rows: run eagerly and replayed, and both compared.

        The call takes effect once. If it is refused, it takes none.
        """
        size = choice.padded_num_tokens
        # Results of other graphs of the pool would not survive the first of several replays.
        args, kwargs = map_tensors(self._pool.kept, call)
        values = self._layout.values(args, kwargs)
        probe = EffectsProbe()
        with probe:
            result = self._function(*args, **kwargs)
        self.note_own_changes()
        reference = map_tensors(torch.clone, result)
        after = probe.contents()
        probe.restore()
        try:
            agreement = self._compare(graph, rows, size, values, reference, probe, after)
        except BaseException as error:
            probe.restore()
            if not (isinstance(error, BatchError) and self._options.eager_fallback):
                raise
            logger.warning("%s; batches of %d run eagerly", error, rows)
            eager = Choice(
                mode=CUDAGraphMode.NONE,
                descriptor=BatchDescriptor(rows),
                reason=Reason.DIFFERS_FROM_EAGER,
            )
            self._refused[size, rows] = eager
            probe.write(after)
            return reference, eager
        if agreement is not Agreement.SAME:
            probe.write(after)
            eager = Choice(
                mode=CUDAGraphMode.NONE, descriptor=BatchDescriptor(rows), reason=Reason.UNVERIFIED
            )
            return reference, eager
        probe.restore()
        self._replay(graph, size, values)
        return self._cut(graph, rows, size), choice

    def _compare(
        self,
        graph: _SizeGraph,
        rows: int,
        size: int,
        values: Sequence[Any],
        reference: Any,
        probe: EffectsProbe,
        after: dict[int, torch.Tensor],
    ) -> Agreement:
        self._replay(graph, size, values)
        if rows < size:
            outputs = OutputLayout.infer(graph.output, reference, size, rows)
            if self._outputs is not None and self._outputs != outputs:
                raise BatchError(
                    f"the result of {rows} rows follows the batch in other dimensions than that of "
                    "earlier batches; return results of one layout, or graph them apart"
                )
            self._outputs = outputs
        if not self._options.verify:
            self._trusted.add((size, rows))
            return Agreement.SAME
        if probe.draws_random_numbers:
            # Of other numbers of rows, and on CUDA, they are others than eager's; but padding rows
            # must not matter to them either.
            if rows < size:
                result = self._cut(graph, rows, size)
                self._check_padding_does_not_matter(graph, rows, size, values, result, probe)
            self._trusted.add((size, rows))
            return Agreement.SAME
        exact = not probe.sees_floats
        worst = Agreement.SAME
        result = self._cut(graph, rows, size)
        for path, agreement, text in differences(result, reference, exact_integers=exact):
            if agreement is Agreement.DIFFERENT:
                raise _differs(path, text, rows, size)
            worst = max(worst, agreement)
        for storage, expected in after.items():
            agreement = compare(probe.in_place(storage), expected, exact_integers=exact)
            if agreement is Agreement.DIFFERENT:
                raise _leaves(self._name_of(storage, values), rows, size)
            worst = max(worst, agreement)
        if rows < size:
            self._check_padding_does_not_matter(graph, rows, size, values, result, probe)
        if worst is Agreement.SAME:
            self._trust(rows, size, values)
            return worst
        self._unclear[size, rows] += 1
        if self._unclear[size, rows] > _MOST_UNCLEAR:
            raise _differs("the result", f"as in {_MOST_UNCLEAR} calls before", rows, size)
        return worst

    def _trust(self, rows: int, size: int, values: Sequence[Any]) -> None:
        """Compare no more batches of this size, if this one would have shown a mix-up."""
        key = (size, rows)
        if rows < size and not self._layout.differs_from_padding(values):
            if key not in self._trials:
                logger.warning(
                    "all rows in a batch of %d are the same as padding, so comparing the batch "
                    "with an eager call shows little; such batches are compared every time",
                    rows,
                )
            self._trials.setdefault(key, 0)  # said once
            return
        self._trials[key] += 1
        often = self._trials[key] >= _ENOUGH_TRIALS
        if rows == size or often or self._layout.has_distinct_rows(values):
            self._trusted.add(key)

    def _check_padding_does_not_matter(
        self,
        graph: _SizeGraph,
        rows: int,
        size: int,
        values: Sequence[Any],
        result: Any,
        probe: EffectsProbe,
    ) -> None:
        """Raise if real rows change when padding rows do."""
        random = torch.get_rng_state() if probe.draws_random_numbers else None

        def replay() -> None:
            if random is not None:
                torch.set_rng_state(random)  # of the CPU: on CUDA, what draws is not compared
            self._pool.replay(graph.tape)

        if probe.draws_random_numbers:
            if self._pool.device.type == "cuda":
                return
            probe.restore()
            self._layout.fill(values, size)
            replay()
            result = self._cut(graph, rows, size)
        kept = list(tensors_in(map_tensors(torch.clone, result)))

        def changed() -> int | None:
            replay()
            now = tensors_in(self._cut(graph, rows, size))
            pairs = enumerate(zip(now, kept, strict=True))
            return next((index for index, pair in pairs if not same_bits(*pair)), None)

        for noise in (0.0,) if probe.rounds_floats_to_integers else _PADDING_NOISE:
            probe.restore()
            self._layout.fill(values, size)
            if not self._layout.vary_padding(values, size, noise):
                return
            index = changed()
            if index is not None:
                break
        else:
            return
        probe.restore()
        self._layout.fill(values, size)
        if changed() is not None:
            return  # it is never the same twice, so this shows nothing
        leaves = leaves_with_path(graph.output, "output")
        paths = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
        raise _differs(paths[index], "it changes when padding rows do", rows, size)

    def _name_of(self, storage: int, values: Sequence[Any]) -> str:
        name = self._layout.name_of(storage, values)
        if name is None and self._watched is not None:
            name = self._watched.name_of(storage)
        return name or "a tensor that the callable refers to"

    # --- capture -------------------------------------------------------------------------------

    def missing(self) -> list[PlanEntry]:
        entries = self.dispatcher.plan.entries
        return [entry for entry in entries if self.dispatcher.is_open(entry)]

    def entry_for(self, rows: int) -> PlanEntry:
        entries = self.dispatcher.plan.entries
        fitting = [entry for entry in entries if entry.descriptor.num_tokens >= rows]
        return min(fitting, key=lambda entry: entry.descriptor.num_tokens)

    def capture(self, entries: Iterable[PlanEntry], values: Sequence[Any], name: str) -> None:
        """Capture with rows like ``values``. What the callable writes is put back afterwards."""
        report = capture_entries(
            list(entries),
            partial(self._capture_one, values),
            pool=self._pool,
            dispatcher=self.dispatcher,
            eager_fallback=self._options.eager_fallback,
            show_progress=self._options.show_progress,
            name=name,
            describe=lambda entry: f"size {entry.descriptor.num_tokens}",
        )
        self.report.entries.extend(report.entries)

    def _capture_one(self, values: Sequence[Any], entry: PlanEntry) -> None:
        size = entry.descriptor.num_tokens
        self._layout.fill_repeated(values, size)
        args, kwargs = self._layout.static_call(size)
        call = partial(self._function, *args, **kwargs)
        watch = self._watch if self._options.watch else None
        rehearsal = Rehearsal(self._function, call, watch=watch)
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
        finally:
            rehearsal.effects.restore()
        written = rehearsal.effects.written
        self._written |= set(self._layout.written_by(written))
        self._written_state |= written - self._layout.storages
        if self._watched is not None:
            self.note_own_changes()
            self._watched.check()  # a size may have replaced what graphs of others read
        elif self._options.watch:
            self._watched = self._watch()
            self._read_state = self._watched.storages
        output = self._pool.weak(captured.output)
        self._graphs[entry.descriptor] = _SizeGraph(tape=captured.tape, output=output)

    def _apart_from_buffers(self, result: Any) -> Any:
        """Results that are arguments, as copies: the next call is copied in where these are."""
        buffers = self._layout.storages
        return map_tensors(lambda t: t.clone() if storage_id(t) in buffers else t, result)

    def _watch(self) -> WatchedState:
        in_breaks = self._options.mode is not CUDAGraphMode.PIECEWISE
        return WatchedState(self._function, in_breaks=in_breaks)

    # --- looking, and letting go ---------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        return sum(len(graph.tape.graphs) for graph in self._graphs.values())

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these numbers."""
        for descriptor, graph in list(self._graphs.items()):
            if graph.tape.serial in serials:
                self._graphs.pop(descriptor).tape.close()

    def clear_graphs(self) -> None:
        """Drop all graphs, and what was found out about them."""
        for graph in self._graphs.values():
            graph.tape.close()
        self._graphs.clear()
        self.dispatcher.reset()
        self._watched = None
        self._written, self._written_state = set(), frozenset()
        self._read_state = frozenset()
        self._outputs = None
        self._trusted.clear()
        self._refused.clear()
        self._trials.clear()
        self._unclear.clear()


def _differs(path: str, text: str, rows: int, size: int) -> BatchError:
    if rows == size:
        return BatchError(
            f"{path} of a graph of {size} rows differs from that of an eager call: {text}; the "
            "callable depends on something that a graph fixes at capture, such as a Python value "
            "that changes from call to call"
        )
    return BatchError(
        f"{path} of {rows} rows padded to {size} differs from that of an eager call: {text}; rows "
        "must not depend on each other, and each row's part of a result must be found in the row's "
        f"order. Add size {rows}, so that nothing is padded, or return results row by row"
    )


def _leaves(name: str, rows: int, size: int) -> BatchError:
    return BatchError(
        f"a batch of {rows} rows padded to {size} leaves {name} other than an eager call does, "
        "since padding rows write to it too; choose padding that keeps them out (padding={...}), "
        f"or add size {rows}"
    )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
