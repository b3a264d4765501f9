"""Closes what owns memory: at the end of a ``with``, and every part even if one raises."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakMethod

R = TypeVar("R")


class Owner:
    """Has something to give back, and gives it back at the end of a ``with``."""

    @abstractmethod
    def close(self) -> None:
        """Give it back. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def weakly(method: Callable[[], R]) -> Callable[[], R]:
    """``method`` without a reference to its object, which is freed as soon as it is dropped.

    For parts of that object, which are used while it is there.
    """
    kept = WeakMethod(method)

    def call() -> R:
        bound = kept()
        assert bound is not None, "a part is used while its object is there"
        return bound()

    return call


def close_each(steps: Iterable[Callable[[], object]]) -> None:
    """Call all steps, in order; the first error that one raised is raised when all have run."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
