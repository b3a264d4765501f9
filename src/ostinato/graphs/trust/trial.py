"""Whether a graph's result is that of an eager call: found out by trying, before it is trusted.

A graph computes padding rows along with real ones, and its result is cut to the real rows. That is
right if row i of the result depends on row i of the arguments alone and is found where it is cut
from. Neither can be seen in a callable, so both are tried with a batch that its caller passed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.errors import BatchError, OstinatoError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.capture.tree import leaves_with_path, map_tensors, tensors_in
from ostinato.graphs.graphed_call import CallLayout
from ostinato.graphs.output_layout import OutputLayout
from ostinato.graphs.trust.agreement import Agreement, compare, differences
from ostinato.graphs.trust.effects import EffectsProbe, FixedDraws
from ostinato.graphs.trust.padding_trial import PaddingTrial
from ostinato.graphs.trust.watched_state import WatchedState


@dataclass(frozen=True, kw_only=True)
class CapturedSize:
    tape: Tape
    output: Any


class Trial:
    """One call that was run eagerly, and whose effects were undone, to be compared with replays.

    ``call``: (args, kwargs), of ``rows`` rows; the graph has ``size``.
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
        # Results of other graphs of the pool would not survive the first of several replays.
        self._args, self._kwargs = map_tensors(pool.kept, call)
        self.values = layout.values(self._args, self._kwargs)
        self._effects = EffectsProbe()
        with self._effects:
            result = function(*self._args, **self._kwargs)
        self._reference = map_tensors(torch.clone, result)
        self._after = self._effects.contents()
        self._effects.restore()

    def undo(self) -> None:
        """Leave everything as it was before the call."""
        self._effects.restore()

    def eager_result(self) -> Any:
        """The result of the eager call, which takes effect."""
        self._effects.write(self._after)
        return self._reference

    @property
    def draws_random_numbers(self) -> bool:
        return self._effects.draws_random_numbers

    def replay(self, written: Iterable[int]) -> None:
        """Replay the call. ``written``: arguments that the callable writes, by position."""
        self._layout.fill(self.values, self._size)
        try:
            self._pool.replay(self._graph.tape)
        except (RuntimeError, IndexError) as error:
            if self._rows == self._size or isinstance(error, OstinatoError):
                raise
            raise BatchError(
                f"{self._rows} rows run, but not padded to {self._size}: "
                f"{type(error).__name__}: {error}; choose padding that the callable can take "
                f"(padding={{...}}), or add size {self._rows}"
            ) from error
        self._layout.write_back(self.values, self._size, written)

    def infer_layout(self) -> OutputLayout:
        return OutputLayout.infer(self._graph.output, self._reference, self._size, self._rows)

    def compare(self, outputs: OutputLayout | None, watched: WatchedState | None) -> Agreement:
        """How the replay compares with the eager call; raises if they are different.

        ``outputs`` may be None if nothing is padded.
        """
        if self._rows == self._size:
            outputs = None  # which need not fit: squeeze() leaves out a dimension for one row
        agreement = Agreement.SAME
        if self.draws_random_numbers:
            self._compare_draws(outputs)
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

    def _compare_draws(self, outputs: OutputLayout | None) -> None:
        """Raise if they differ where random numbers are drawn.

        Those that a row gets depend on the number of rows. So the graph is compared with as many
        rows, padding and all, and the two numbers of rows with what is drawn held fixed.
        """
        static = self._layout.static_call(self._size)
        padded = self._run_eagerly(*static)
        self._layout.fill(self.values, self._size)
        self._pool.replay(self._graph.tape)
        self._agreement(self._graph.output, padded, self._size, exact=False)
        if self._rows < self._size:
            real = self._run_eagerly(self._args, self._kwargs, draws=FixedDraws())
            padded = self._run_eagerly(*static, draws=FixedDraws())
            self._agreement(self._cut(padded, outputs), real, self._rows, exact=False)

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
        """Raise if real rows, or what the callable writes besides, change when padding rows do."""
        # Padding that was chosen may send what padding rows write to a place of their own.
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
            "it changes when padding rows do (if what they hold tells the callable to leave "
            "them out, pass it as padding={...})"
        )
        raise differs(paths[index], text, self._rows, self._size)

    def check_does_not_read(self, names: Sequence[str]) -> None:
        """Raise if the result depends on values that the call itself left behind under ``names``.

        A replay leaves none.
        """
        again = self._run_eagerly(self._args, self._kwargs)
        for path, agreement, text in differences(again, self._reference, exact_integers=True):
            if agreement is Agreement.DIFFERENT:
                raise BatchError(
                    f"{path} depends on what the call before left in {', '.join(names)} ({text}), "
                    "but a replay runs no Python and leaves nothing; pass it as an argument, or "
                    "keep it in a tensor that is changed in place"
                )


def differs(path: str, text: str, rows: int, size: int) -> BatchError:
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
