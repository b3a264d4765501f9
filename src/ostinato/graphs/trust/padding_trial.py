"""Checks that real rows of a graph's result do not depend on the contents of padding rows.

The first batch may not show it: with integers and zero padding, ``x - x.min()`` is right for every
batch that contains a 0. So the trial replays with other values in the padding rows and in the real
rows, always taken from what the caller passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ostinato.errors import OstinatoError
from ostinato.graphs.capture.call_layout import CallLayout
from ostinato.graphs.trust.comparison import same_bits

# Spread of the noise in padding rows: none (rows of the batch), then to both sides, so that any
# sort or comparison across rows changes for at least one of them.
_NOISE = (0.0, 3.0, -3.0)
# Distance of real rows from 0, to either side: next to these, padding rows of 0 are the smallest or
# the largest rows, and the only ones to fail or to pass a test (``(x > 0).all()``).
_FAR_OFF = (30.0, -30.0)


class PaddingTrial:
    """Replays with other rows. ``replay`` runs the graph on the current buffer contents, from the
    state before the call, and returns the tensors in the real rows of the result."""

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
        """``with_noise``: try numbers near the batch's. ``with_other_rows``: try new row mixes."""
        self._layout = layout
        self._values = values
        self._size = size
        self._replay = replay
        self._with_noise = with_noise
        self._with_other_rows = with_other_rows

    def changed_output(self) -> int | None:
        """Index of a result tensor that changes with padding rows, or None. Synchronises."""
        for as_captured, others in self._arrangements():
            first = self._result_of(as_captured)
            for other in others:
                result = self._result_of(other)
                if first is None or result is None:
                    continue
                index = _first_difference(first, result)
                if index is None:
                    continue
                again = self._result_of(as_captured)
                repeats = again is not None and _first_difference(first, again) is None
                return index if repeats else None  # a nondeterministic result proves nothing
        return None

    def _arrangements(self) -> Iterator[tuple[Callable[[], Any], list[Callable[[], Any]]]]:
        """Ways to fill the real rows, each with several ways to fill the padding rows."""
        layout, values, size = self._layout, self._values, self._size
        if layout.varies(values, floats=True):
            noises = _NOISE if self._with_noise else _NOISE[:1]
            vary = partial(layout.vary_padding, values, size)
            yield partial(layout.fill, values, size), [partial(vary, noise) for noise in noises]
            for distance in _FAR_OFF if self._with_noise else ():
                fill = partial(layout.fill_far_off, values, size, distance)
                yield fill, [partial(fill, padding=True)]
        if self._with_other_rows and layout.varies(values, floats=False):
            extremes = layout.extreme_rows(values)
            for row in extremes:
                fill = partial(layout.fill_with_row, values, size, row)
                yield fill, [partial(fill, padding=other) for other in extremes]

    def _result_of(self, arrange: Callable[[], Any]) -> list[torch.Tensor] | None:
        """The result for rows like these; None if an operator rejects such numbers."""
        arrange()
        try:
            return [tensor.clone() for tensor in self._replay()]
        except OstinatoError:
            raise
        except (RuntimeError, IndexError):
            return None


def _first_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> int | None:
    pairs = enumerate(zip(a, b, strict=True))
    return next((index for index, pair in pairs if not same_bits(*pair)), None)
