"""A script that runs on every rank: rank 0 does what it asks for, and all ranks get the result."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ostinato.errors import RankFailedError
from ostinato.runtime.parallel.plan_message import Kind, to_words
from ostinato.runtime.parallel.steps import FollowingRunner
from ostinato.runtime.parallel.world import World, uninterrupted

T = TypeVar("T")


class _Sharing(ABC):
    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which rank 0 runs."""

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Rank 0's ``items``, one by one."""
        while True:
            item = self.call(lambda: next(items, _END))
            if isinstance(item, _End):
                return
            yield item


class SharingLeader(_Sharing):
    """Rank 0 of ranks that all run the script."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call(self, function: Callable[[], T]) -> T:
        try:
            result = function()
        except BaseException as error:
            self._share(_portable(error), failed=True)
            raise
        self._share(result)
        return result

    def _share(self, result: Any, *, failed: bool = False) -> None:
        if failed and self._world.failed:
            return  # they know
        message = to_words(pickle.dumps((failed, result)))
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(Kind.RESULT, message)


class SharingFollower(_Sharing):
    """Any other of the ranks that all run the script."""

    def __init__(self, runner: FollowingRunner) -> None:
        self._runner = runner

    def call(self, function: Callable[[], T]) -> T:
        failed, result = self._runner.follow()
        if failed:
            raise result
        shared: T = result
        return shared


class _End:
    """What follows the last item."""


_END = _End()


def _portable(error: BaseException) -> Exception:
    """``error``, or what can be said of it on another rank."""
    described = RankFailedError(f"rank 0 raised {type(error).__name__}: {error}", 0)
    if not isinstance(error, Exception):
        return described
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # anybody's error, with anything in it
        return described
    return error
