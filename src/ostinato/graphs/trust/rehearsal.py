"""Runs a callable the way a capture will, to find side effects that a replay cannot repeat.

A capture runs the callable several times, and a replay runs no Python at all. So a callable cannot
be captured if its result depends on how often it ran, or if it replaces what it reads. The
rehearsal detects both and raises an error that names the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ostinato.compat import parametrized_weights_are_cached
from ostinato.errors import CaptureError
from ostinato.graphs.capture.signature import is_fixed, same_value
from ostinato.graphs.tree import leaves_with_path, map_tensors
from ostinato.graphs.trust.comparison import Agreement, differences, same_bits
from ostinato.graphs.trust.effects import EffectsProbe, SeedingProbe
from ostinato.graphs.trust.watched_state import WatchedState, show

logger = logging.getLogger(__name__)


class Rehearsal:
    """Runs ``call``, which is ``function`` applied to arguments that stay in place.

    ``effects`` records what the runs wrote and can undo it. Without ``watch``, the state that the
    callable refers to is not checked. The callable must not seed ``generators``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: Callable[[], Any],
        *,
        watch: Callable[[], WatchedState] | None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function = function
        self._call = call
        self._watch = watch
        self._generators = generators
        self.effects = EffectsProbe()
        for generator in generators:
            self.effects.keep_state_of(generator)
        self._before: WatchedState | None = None
        self._watched: WatchedState | None = None

    def run(self, *, thoroughly: bool) -> None:
        """Run it once; with ``thoroughly``, several times, to check that the result repeats."""
        if self._watch is not None:
            self._before = self._watch()
        first = self._run(self.effects)
        if parametrized_weights_are_cached():
            raise CaptureError(
                "a capture was started inside torch.nn.utils.parametrize.cached(), so the graph "
                "would keep the weights cached there; call it outside of cached() first"
            )
        if self._watch is not None:
            # The first run may create state, such as a cache. Later runs must keep it.
            self._watched = self._watch()
        if not thoroughly:
            return
        self.effects.restore()
        again = EffectsProbe()
        with SeedingProbe(self._generators):
            second = self._run(again)
        self.check_nothing_replaced()
        self._check_makes_no_state(again)
        self._check_writes_again(again)
        self.effects.absorb(again)
        if self.effects.draws_random_numbers:
            self._point_out_training()
        elif not _same(first, second):
            self._check_repeats(first, second)

    def _run(self, effects: EffectsProbe) -> Any:
        with effects:
            result = self._call()
        return map_tensors(torch.clone, result)

    def _check_makes_no_state(self, again: EffectsProbe) -> None:
        """Refuse state that a first run creates and later runs change: its start value is lost."""
        for storage in again.written.keys() & self.effects.created:
            name = WatchedState(self._function).name_of(storage)
            if name is not None:
                raise CaptureError(
                    f"{name} is created by the first call and changed in place by later ones, but "
                    "a capture runs the call several times; create it before the first call"
                )

    def _check_writes_again(self, again: EffectsProbe) -> None:
        """Refuse state that only the first run writes: undoing that run would lose the write."""
        for storage in self.effects.written.keys() - again.written.keys():
            name = WatchedState(self._function).name_of(storage)
            if name is None:
                continue  # not the callable's state; for example, buffers of graphs inside it
            raise CaptureError(
                f"only the first call writes {name}, but the writes of a capture are undone; call "
                "it once before graphed(), so that this write has already happened"
            )

    def _check_repeats(self, first: Any, second: Any) -> None:
        """Refuse a result that differs between runs, or only in the first run, beyond rounding."""
        self.effects.restore()
        third = self._run(EffectsProbe())
        if not _same(second, third):
            _check_can_be_filled(second, third)
            for path, agreement, text in _differences(third, second):
                if agreement is not Agreement.SAME:
                    raise CaptureError(
                        f"{path} changes from run to run on the same rows ({text}); a graph would "
                        "keep its value at capture, so compute it from arguments, or from tensors "
                        "that are changed in place"
                    )
        for path, agreement, text in _differences(second, first):
            if agreement is Agreement.DIFFERENT:
                raise CaptureError(
                    f"{path} differs between the first call and later calls on the same rows "
                    f"({text}); call it once before graphed()"
                )

    def check_nothing_replaced(self) -> None:
        """Refuse a run that replaces an object it refers to: a replay would not replace it, and
        the graph would keep reading the original."""
        for slot, was, now in self._watched.replaced() if self._watched is not None else ():
            slot.write(was)
            raise CaptureError(
                f"{slot.name} is replaced inside the call (it was {show(was)}, then {show(now)}), "
                "which a replay would not do; write into a tensor instead (copy_, add_, ...), or "
                "move the assignment out of the callable"
            )

    def put_back_names(self) -> None:
        """Restore what names referred to before the first run: a refused call has no effect.

        Otherwise a flag such as "initialized" would outlive the undone initialization.
        """
        for slot, was, _ in self._before.replaced() if self._before is not None else ():
            slot.write(was)

    def _point_out_training(self) -> None:
        function = self._function
        if isinstance(function, torch.nn.Module) and function.training:
            logger.warning(
                "%s is in training mode and draws random numbers (dropout?) in its graphs; call "
                "eval() first if it is for inference",
                type(function).__name__,
            )


def _check_can_be_filled(result: Any, other: Any) -> None:
    """Refuse a result that keeps tensors inside an opaque object."""
    pairs = zip(leaves_with_path(result, "output"), leaves_with_path(other, "output"), strict=False)
    for (path, leaf), (_, its_like) in pairs:
        plain = isinstance(leaf, torch.Tensor) or is_fixed(leaf)
        if not plain and not same_value(leaf, its_like):
            raise CaptureError(
                f"{path} is a {type(leaf).__qualname__} that every call creates, and a replay "
                "would return the one from the capture; return tensors, in dicts, lists, tuples or "
                "dataclasses"
            )


def _differences(result: Any, reference: Any) -> Iterator[tuple[str, Agreement, str]]:
    shapes = [
        [path for path, _ in leaves_with_path(each, "output")] for each in (result, reference)
    ]
    if shapes[0] != shapes[1]:
        yield "the structure of the result", Agreement.DIFFERENT, f"{shapes[0]} and {shapes[1]}"
        return
    yield from differences(result, reference, exact_integers=True)


def _same(a: Any, b: Any) -> bool:
    """Whether two results are bitwise equal."""
    left, right = (list(leaves_with_path(each, "output")) for each in (a, b))
    return [path for path, _ in left] == [path for path, _ in right] and all(
        same_bits(x, y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and _alike(x, y)
        else same_value(x, y)
        for (_, x), (_, y) in zip(left, right, strict=True)
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
