"""Compares a graph's result with an eager call before the graph is trusted.

A graph computes padding rows along with the real ones, and its result is cut to the real rows. That
is right if row i of the result depends only on row i of the arguments, and sits where the cut
expects it. Neither is visible in the callable, so both are tested on a batch from the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.errors import BatchError, OstinatoError
from ostinato.graphs.capture.call_layout import CallLayout
from ostinato.graphs.capture.output_layout import OutputLayout
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.tree import leaves_with_path, map_tensors, tensors_in
from ostinato.graphs.trust.argument_watch import ArgumentWatch
from ostinato.graphs.trust.comparison import Agreement, compare, differences
from ostinato.graphs.trust.effects import EffectsProbe, FixedDraws
from ostinato.graphs.trust.padding_trial import PaddingTrial
from ostinato.graphs.trust.watched_state import WatchedState


@dataclass(frozen=True, kw_only=True)
class CapturedSize:
    tape: Tape
    output: Any


class Trial:
    """One call that was run eagerly and undone, to compare replays with.

    ``call`` is (args, kwargs) with ``rows`` rows; the graph has ``size`` rows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        layout: CallLayout,
        pool: GraphPool,
        graph: CapturedSize,
        call: tuple[Any, Any],
        *,
        rows: int,
        size: int,
    ) -> None:
        self._function, self._layout, self._pool, self._graph = function, layout, pool, graph
        self._rows, self._size = rows, size
        # Outputs of other graphs in the pool would be overwritten by the first of several replays.
        self._args, self._kwargs = map_tensors(pool.kept, call)
        self.values = layout.values(self._args, self._kwargs)
        self._effects = EffectsProbe()
        watch = ArgumentWatch(layout.named(self._args, self._kwargs))
        with self._effects:
            result = function(*self._args, **self._kwargs)
        self._reference = map_tensors(torch.clone, result)
        self._after = self._effects.contents()
        self._effects.restore()
        try:
            watch.check()
        finally:
            watch.put_back()

    def undo(self) -> None:
        """Restore the state before the call."""
        self._effects.restore()

    def eager_result(self) -> Any:
        """The eager call's result; this also applies its side effects."""
        self._effects.write(self._after)
        return self._reference

    @property
    def draws_random_numbers(self) -> bool:
        return self._effects.draws_random_numbers

    def replay(self, written: Iterable[int]) -> None:
        """Replay the call. ``written``: positions of arguments that the callable writes."""
        self._layout.fill(self.values, self._size)
        try:
            self._pool.replay(self._graph.tape)
        except (RuntimeError, IndexError) as error:
            if self._rows == self._size or isinstance(error, OstinatoError):
                raise
            raise BatchError(
                f"{self._rows} rows run, but fail when padded to {self._size}: "
                f"{type(error).__name__}: {error}; choose padding that the callable accepts "
                f"(padding={{...}}), or add size {self._rows}"
            ) from error
        self._layout.write_back(self.values, self._size, written)

    def infer_layout(self) -> OutputLayout:
        return OutputLayout.infer(self._graph.output, self._reference, self._size, self._rows)

    def compare(self, outputs: OutputLayout | None, watched: WatchedState | None) -> Agreement:
        """Compare the replay with the eager call; raise if they differ.

        ``outputs`` may be None if nothing is padded.
        """
        if self._rows == self._size:
            outputs = None  # it may not apply: squeeze() drops a dimension for one row
        agreement = Agreement.SAME
        if self.draws_random_numbers:
            agreement = self._compare_draws(outputs)
        else:
            exact = not self._effects.sees_floats
            result = self._cut(self._graph.output, outputs)
            agreement = self._agreement(result, self._reference, self._rows, exact=exact)
            agreement = max(agreement, self._compare_memory(watched, exact=exact))
        if self._rows < self._size:
            self._check_padding_does_not_matter(outputs, watched)
        return agreement

    def _cut(self, output: Any, outputs: OutputLayout | None) -> Any:
        return output if outputs is None else outputs.cut(output, self._rows)

    def _agreement(self, result: Any, reference: Any, rows: int, *, exact: bool) -> Agreement:
        worst = Agreement.SAME
        for path, agreement, text in differences(result, reference, exact_integers=exact):
            if agreement is Agreement.DIFFERENT:
                raise differs(path, text, rows, self._size)
            worst = max(worst, agreement)
        return worst

    def _compare_memory(self, watched: WatchedState | None, *, exact: bool) -> Agreement:
        worst = Agreement.SAME
        for storage, expected in self._after.memory.items():
            in_place = self._effects.in_place(storage)
            agreement = compare(in_place, expected, exact_integers=exact)
            if agreement is Agreement.DIFFERENT:
                name = self._layout.name_of(storage, self.values)
                if name is None and watched is not None:
                    name = watched.name_of(storage)
                raise _leaves(
                    name or "a tensor that the callable refers to", self._rows, self._size
                )
            worst = max(worst, agreement)
        return worst

    def _compare_draws(self, outputs: OutputLayout | None) -> Agreement:
        """Compare the results of a call that draws random numbers; raise if they differ.

        The numbers a row draws depend on the batch size. So the graph is compared with an eager
        call of the same padded size, and the two sizes are compared with draws held fixed.
        """
        static = self._layout.static_call(self._size)
        padded = self._run_eagerly(*static)
        self._layout.fill(self.values, self._size)
        self._pool.replay(self._graph.tape)
        agreement = self._agreement(self._graph.output, padded, self._size, exact=False)
        if self._rows < self._size:
            real = self._run_eagerly(self._args, self._kwargs, draws=FixedDraws())
            padded = self._run_eagerly(*static, draws=FixedDraws())
            result = self._cut(padded, outputs)
            agreement = max(agreement, self._agreement(result, real, self._rows, exact=False))
        return agreement

    def _run_eagerly(self, args: Any, kwargs: Any, draws: FixedDraws | None = None) -> Any:
        self.undo()
        self._layout.fill(self.values, self._size)
        effects = EffectsProbe()
        with effects, draws or contextlib.nullcontext():
            result = self._function(*args, **kwargs)
        result = map_tensors(torch.clone, result)
        effects.restore()
        return result

    def _check_padding_does_not_matter(
        self, outputs: OutputLayout | None, watched: WatchedState | None
    ) -> None:
        """Raise if real rows, or state that the callable writes, depend on padding rows."""
        # Padding chosen by the caller may direct the writes of padding rows to a scratch location.
        written = () if self._layout.has_chosen_padding else tuple(self._after.memory)

        def replay() -> list[torch.Tensor]:
            self.undo()
            self._pool.replay(self._graph.tape)
            result = list(tensors_in(self._cut(self._graph.output, outputs)))
            return [*result, *map(self._effects.in_place, written)]

        safe = self._effects.takes_any_number
        trial = PaddingTrial(
            self._layout,
            self.values,
            self._size,
            replay,
            with_noise=safe,
            with_other_rows=safe and not self._effects.may_index_anywhere,
        )
        index = trial.changed_output()
        if index is None:
            return
        leaves = leaves_with_path(self._graph.output, "output")
        paths = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
        if index >= len(paths):
            name = None if watched is None else watched.name_of(written[index - len(paths)])
            raise _leaves(name or "a tensor that the callable refers to", self._rows, self._size)
        text = (
            "it changes when padding rows change (if their contents tell the callable to skip "
            "them, pass it as padding={...})"
        )
        raise differs(paths[index], text, self._rows, self._size)

    def check_does_not_read(self, names: Sequence[str]) -> None:
        """Raise if the result depends on values that the call left under ``names``.

        A replay leaves none.
        """
        again = self._run_eagerly(self._args, self._kwargs)
        for path, agreement, text in differences(again, self._reference, exact_integers=True):
            if agreement is Agreement.DIFFERENT:
                raise BatchError(
                    f"{path} depends on what the previous call left in {', '.join(names)} "
                    f"({text}), but a replay runs no Python and leaves nothing; pass it as an "
                    "argument, or keep it in a tensor that is changed in place"
                )


def differs(path: str, text: str, rows: int, size: int) -> BatchError:
    if rows == size:
        return BatchError(
            f"{path} of a graph of {size} rows differs from an eager call: {text}; the callable "
            "depends on something that a graph fixes at capture, such as a Python value that "
            "changes from call to call"
        )
    return BatchError(
        f"{path} of {rows} rows padded to {size} differs from an eager call: {text}; rows must not "
        "depend on each other, and results must be in row order. Add size "
        f"{rows}, so that nothing is padded, or return results row by row"
    )


def _leaves(name: str, rows: int, size: int) -> BatchError:
    return BatchError(
        f"a batch of {rows} rows padded to {size} leaves {name} different from an eager call, "
        "because padding rows write to it too; choose padding that prevents this "
        f"(padding={{...}}), or add size {rows}"
    )
