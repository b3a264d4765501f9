"""Locates the real rows in a padded result by comparing output shapes of two batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ostinato.errors import BatchError
from ostinato.graphs.capture.signature import same_value
from ostinato.graphs.tree import leaves_with_path, map_tensors


@dataclass(frozen=True)
class OutputLayout:
    """Which dimensions of each result scale with the batch."""

    scaling: tuple[tuple[tuple[int, int], ...], ...]  # per tensor: (dimension, rows per batch row)

    @classmethod
    def infer(cls, padded: Any, reference: Any, size: int, rows: int) -> OutputLayout:
        """Compare the result of ``size`` rows with one of fewer rows, ``rows``."""
        large, small = (list(leaves_with_path(each, "output")) for each in (padded, reference))
        if [path for path, _ in large] != [path for path, _ in small]:
            raise BatchError(
                f"the result has a different structure for a batch of {size} than for one of {rows}"
            )
        scaling = []
        for (path, of_size), (_, of_rows) in zip(large, small, strict=True):
            if isinstance(of_size, torch.Tensor) and isinstance(of_rows, torch.Tensor):
                scaling.append(_scaling(path, of_size.shape, of_rows.shape, size, rows))
            elif not same_value(of_size, of_rows):
                raise BatchError(
                    f"{path} is {of_size!r} for a batch of {size} and {of_rows!r} for one of "
                    f"{rows}; values other than tensors are fixed when a graph is captured, so "
                    "return tensors only"
                )
        return cls(tuple(scaling))

    def cut(self, output: Any, rows: int) -> Any:
        """Views of the real rows of a padded result, in new containers."""
        scaling = iter(self.scaling)

        def cut_one(tensor: torch.Tensor) -> torch.Tensor:
            for dim, per_row in next(scaling):
                tensor = tensor.narrow(dim, 0, rows * per_row)
            return tensor

        return map_tensors(cut_one, output)


def _scaling(
    path: str, large: torch.Size, small: torch.Size, size: int, rows: int
) -> tuple[tuple[int, int], ...]:
    if len(large) == len(small):
        dims = [dim for dim in range(len(large)) if large[dim] != small[dim]]
        if all(large[d] * rows == small[d] * size and large[d] % size == 0 for d in dims):
            return tuple((dim, large[dim] // size) for dim in dims)
    raise BatchError(
        f"{path} has shape {tuple(large)} for a batch of {size} and {tuple(small)} for one of "
        f"{rows}; each dimension must stay the same or grow in proportion to the batch"
    )
