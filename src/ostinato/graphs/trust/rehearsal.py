"""Running a callable as a capture will, to learn what it does besides computing its result.

A capture takes several runs, and a replay takes none at all: Python does not run in it. So a
callable whose result depends on how often it ran, or that replaces what it reads, cannot be
captured. That is found out here, and refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.capture.signature import is_fixed, same_value
from ostinato.graphs.capture.tree import leaves_with_path, map_tensors
from ostinato.graphs.trust.agreement import Agreement, differences, same_bits
from ostinato.graphs.trust.effects import EffectsProbe, SeedingProbe
from ostinato.graphs.trust.watched_state import WatchedState, show

logger = logging.getLogger(__name__)


class Rehearsal:
    """Runs ``call``, which is ``function`` on arguments that stay where they are.

    ``effects`` knows what the runs wrote, and puts it back. Without ``watch``, what the callable
    refers to is not looked at. ``generators`` must not be seeded by it.
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
        """Run it once. Thoroughly: more often, to see whether the result stays the same."""
        if self._watch is not None:
            self._before = self._watch()
        first = self._run(self.effects)
        if self._watch is not None:
            # What it makes for itself on its first run may stay. From then on it refers to that.
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
        """Refuse state that a run makes and later runs change: its start would be lost."""
        for storage in again.written & self.effects.created:
            name = WatchedState(self._function).name_of(storage)
            if name is not None:
                raise CaptureError(
                    f"{name} is made by the first call and changed in place by every other, but a "
                    "capture needs several calls, which would count; make it before the first call"
                )

    def _check_writes_again(self, again: EffectsProbe) -> None:
        """Refuse what the first run alone writes: it is put back, and no later run writes it."""
        for storage in self.effects.written - again.written:
            name = WatchedState(self._function).name_of(storage)
            if name is None:
                continue  # no state of the callable: buffers of graphs inside it, for one
            raise CaptureError(
                f"{name} is written by the first call alone, but the writes of a capture are put "
                "back; call it once before it is graphed, so that this is done"
            )

    def _check_repeats(self, first: Any, second: Any) -> None:
        """Refuse a result that is another one each time, or the first time, apart from rounding."""
        self.effects.restore()
        third = self._run(EffectsProbe())
        if not _same(second, third):
            _check_can_be_filled(second, third)
            for path, agreement, text in _differences(third, second):
                if agreement is not Agreement.SAME:
                    raise CaptureError(
                        f"{path} changes from run to run on the same rows ({text}); a graph would "
                        "hold what it was at capture, so let it depend on arguments, or on tensors "
                        "that are changed in place"
                    )
        for path, agreement, text in _differences(second, first):
            if agreement is Agreement.DIFFERENT:
                raise CaptureError(
                    f"{path} of the first call differs from that of later ones on the same rows "
                    f"({text}); call it once before it is graphed"
                )

    def check_nothing_replaced(self) -> None:
        """Refuse a run that replaced what it refers to: a replay would not, and a graph would go on
        reading the first."""
        for slot, was, now in self._watched.replaced() if self._watched is not None else ():
            slot.write(was)
            raise CaptureError(
                f"{slot.name} is replaced inside the call (it was {show(was)}, and then "
                f"{show(now)}), which a replay would not do; write into a tensor instead (copy_, "
                "add_, ...), or keep it out of the callable"
            )

    def put_back_names(self) -> None:
        """Let names refer to what they did before the first run: a refused call takes no effect.

        A note that something was done would be wrong once what was done is put back.
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
    """Refuse a result whose tensors are in an object that cannot be looked into."""
    pairs = zip(leaves_with_path(result, "output"), leaves_with_path(other, "output"), strict=False)
    for (path, leaf), (_, its_like) in pairs:
        plain = isinstance(leaf, torch.Tensor) or is_fixed(leaf)
        if not plain and not same_value(leaf, its_like):
            raise CaptureError(
                f"{path} is a {type(leaf).__qualname__}, made anew by every call, and a replay "
                "would return that of the capture; return tensors, in dicts, lists, tuples or "
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
    """Whether two results are equal to the bit."""
    left, right = (list(leaves_with_path(each, "output")) for each in (a, b))
    return [path for path, _ in left] == [path for path, _ in right] and all(
        same_bits(x, y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and _alike(x, y)
        else same_value(x, y)
        for (_, x), (_, y) in zip(left, right, strict=True)
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
