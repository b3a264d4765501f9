"""Whether real rows of a graph's result stay the same whatever padding rows hold.

A first batch may not show it: with integers, ``x - x.min()`` is right for every batch that has a 0
in it, if 0 is what padding is. So padding rows are given other values, and so are the real rows,
each time such as the caller passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ostinato.errors import OstinatoError
from ostinato.graphs.graphed_call import CallLayout
from ostinato.graphs.trust.agreement import same_bits

# How far numbers are spread that padding rows are tried with: not at all (rows of the batch), and
# to both sides, so that whatever is sorted or compared across rows comes out otherwise for one.
_NOISE = (0.0, 3.0, -3.0)


class PaddingTrial:
    """Replays with other rows. ``replay``: on what the buffers hold now, from the state before the
    call; it gives the tensors in the real rows of the result."""

    def __init__(
        self,
        layout: CallLayout,
        values: Sequence[Any],
        size: int,
        replay: Callable[[], Sequence[torch.Tensor]],
        *,
        with_noise: bool,
        with_other_rows: bool,
    ) -> None:
        """Whether to try numbers near the batch's, and rows of it side by side that were not."""
        self._layout = layout
        self._values = values
        self._size = size
        self._replay = replay
        self._with_noise = with_noise
        self._with_other_rows = with_other_rows

    def changed_output(self) -> int | None:
        """Which tensor of the result changes with padding rows; None if all stay. Synchronises."""
        for as_captured, others in self._arrangements():
            first = self._result_of(as_captured)
            for other in others:
                try:
                    index = _first_difference(first, self._result_of(other))
                except OstinatoError:
                    raise
                except (RuntimeError, IndexError):
                    continue  # an operator does not take such numbers
                if index is None:
                    continue
                repeats = _first_difference(first, self._result_of(as_captured)) is None
                return index if repeats else None  # if never the same twice, this shows nothing
        return None

    def _arrangements(self) -> Iterator[tuple[Callable[[], Any], list[Callable[[], Any]]]]:
        """Ways to fill real rows, each with other ways to fill the padding rows beside them."""
        layout, values, size = self._layout, self._values, self._size
        if layout.varies(values, floats=True):
            noises = _NOISE if self._with_noise else _NOISE[:1]
            vary = partial(layout.vary_padding, values, size)
            yield partial(layout.fill, values, size), [partial(vary, noise) for noise in noises]
        if self._with_other_rows and layout.varies(values, floats=False):
            extremes = layout.extreme_rows(values)
            for row in extremes:
                fill = partial(layout.fill_with_row, values, size, row)
                yield fill, [partial(fill, padding=other) for other in extremes]

    def _result_of(self, arrange: Callable[[], Any]) -> list[torch.Tensor]:
        arrange()
        return [tensor.clone() for tensor in self._replay()]


def _first_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> int | None:
    pairs = enumerate(zip(a, b, strict=True))
    return next((index for index, pair in pairs if not same_bits(*pair)), None)
