"""Memory that a step writes and that outlives it, so that the step can be undone and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """The elements of ``tensor`` at ``index`` (None: all), under a ``name`` for reports.

    ``compared``: the step must leave the same bits there whichever way it runs. Other parts are
    only put back.
    """

    name: str
    tensor: torch.Tensor
    index: tuple[Any, ...] | None = None
    compared: bool = True

    def read(self) -> torch.Tensor:
        """A copy of the contents."""
        return self.tensor.clone() if self.index is None else self.tensor[self.index].clone()

    def write(self, contents: torch.Tensor) -> None:
        if self.index is None:
            self.tensor.copy_(contents)
        else:
            self.tensor[self.index] = contents


Contents = Mapping[str, torch.Tensor]


def read_parts(parts: Iterable[MemoryPart]) -> dict[str, torch.Tensor]:
    return {part.name: part.read() for part in parts}


def write_parts(parts: Iterable[MemoryPart], contents: Contents) -> None:
    for part in parts:
        part.write(contents[part.name])


def compared(parts: Sequence[MemoryPart], contents: Contents) -> dict[str, torch.Tensor]:
    """The contents of the parts that must agree."""
    return {part.name: contents[part.name] for part in parts if part.compared}
