"""Who runs a script's calls, and who gets their results: on one process, the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

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
