"""What a step changes and what outlives it, so that the step can be undone and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class StepPart(Protocol):
    """What a step changes: memory, or the state of a generator."""

    @property
    def name(self) -> str: ...

    @property
    def compared(self) -> bool:
        """Whether the step must leave the same bits there whichever way it runs."""

    def read(self) -> torch.Tensor:
        """A copy of the contents."""

    def write(self, contents: torch.Tensor) -> None: ...


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
        """Put back ``contents``, which ``read`` returned."""
        if self.index is None:
            self.tensor.copy_(contents)
        else:
            self.tensor[self.index] = contents


@dataclass(frozen=True)
class GeneratorPart:
    """The state of a random generator: a run that is undone has drawn nothing from it."""

    generator: torch.Generator
    compared: bool = False

    @property
    def name(self) -> str:
        return f"generator {id(self.generator)}"

    def read(self) -> torch.Tensor:
        return self.generator.get_state()

    def write(self, contents: torch.Tensor) -> None:
        self.generator.set_state(contents)


Contents = Mapping[str, torch.Tensor]


def read_parts(parts: Iterable[StepPart]) -> dict[str, torch.Tensor]:
    return {part.name: part.read() for part in parts}


def write_parts(parts: Iterable[StepPart], contents: Contents) -> None:
    for part in parts:
        part.write(contents[part.name])


def compared(parts: Sequence[StepPart], contents: Contents) -> dict[str, torch.Tensor]:
    """The contents of the parts that must agree."""
    return {part.name: contents[part.name] for part in parts if part.compared}
