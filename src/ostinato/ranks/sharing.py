"""Who runs a script's calls, and who gets their results: on one process, the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ostinato.graphs.policy.modes import ResolvedMode
from ostinato.loading.load import LoadedModel
from ostinato.runner.model_runner import ModelRunner

T = TypeVar("T")


class Sharing(Protocol):
    """How what a script calls on all ranks is done by one of them, and returned on all."""

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises on rank 0."""

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """The items that ``items`` yields on rank 0, one by one."""


class Unshared:
    """One process runs the script. Ranks that were started for it are no part of it."""

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        return items


@dataclass(frozen=True, kw_only=True)
class Started:
    """All that an engine needs. On several ranks, ``sharing`` gives all of them the results."""

    loaded: LoadedModel
    runner: ModelRunner
    resolved_mode: ResolvedMode
    sharing: Sharing
