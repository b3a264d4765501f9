"""A tensor's contents at one moment: a copy if it is small, else a digest of its bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ostinato.graphs.trust.comparison import same_bits
from ostinato.graphs.trust.shadow.differences import max_difference

_LARGEST_COPY = 2**20  # bytes; a step calls hundreds of operators
_CHUNK = 2**20
_PERIOD = 8191  # a prime: equal chunks that swap places do not cancel


class KeptValue(NamedTuple):
    """``copy`` or ``digest`` is set. A digest tells whether bits differ, not by how much.

    ``of_rows``: it holds the rows of interest alone.
    """

    copy: torch.Tensor | None
    digest: int | None
    of_rows: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: Mapping[int, slice]) -> KeptValue:
        """The contents; only ``rows[n]`` of them if there are n, in the first dimension above 1."""
        dim = 1 if tensor.dim() > 1 and tensor.shape[0] == 1 and 1 not in rows else 0
        count = tensor.shape[dim] if tensor.dim() else None
        kept = None if count is None else rows.get(count)
        if kept is not None:
            tensor = tensor[kept] if dim == 0 else tensor[:, kept]
        if tensor.nbytes <= _LARGEST_COPY:
            return cls(tensor.detach().clone(), None, kept is not None)
        return cls(None, _digest(tensor), kept is not None)

    def difference_from(self, other: KeptValue) -> float | None:
        """The largest difference; None if there is none; NaN if it is known only that they do."""
        if self.copy is None or other.copy is None:
            return None if self.digest == other.digest else float("nan")
        mine, its = self.copy, other.copy
        alike = mine.shape == its.shape and mine.dtype == its.dtype
        return None if alike and same_bits(mine, its) else max_difference(mine, its)


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = 0
    for number, chunk in enumerate(flat.split(_CHUNK)):
        wide = chunk.to(torch.int64)
        weights = torch.arange(wide.numel(), device=wide.device) % _PERIOD + 1
        total += (number + 1) * int((wide * weights).sum())
    return total
