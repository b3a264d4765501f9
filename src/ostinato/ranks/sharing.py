"""Decides which process runs a script's calls and which ones get the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ostinato.graphs.policy.modes import ResolvedMode
from ostinato.loading.load import LoadedModel
from ostinato.runner.model_runner import ModelRunner

T = TypeVar("T")


class Sharing(Protocol):
    """Runs a call that a script makes on all ranks on one of them, and returns it on all."""

    def call(self, function: Callable[[], T]) -> T:
        """Return or raise what ``function`` does on rank 0."""

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items that ``items`` yields on rank 0, one at a time."""


class Unshared:
    """One process runs the script. Ranks that it started do not run it."""

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        return items


@dataclass(frozen=True, kw_only=True)
class Started:
    """What an engine needs. With several ranks, ``sharing`` gives all of them the results."""

    loaded: LoadedModel
    runner: ModelRunner
    resolved_mode: ResolvedMode
    sharing: Sharing
