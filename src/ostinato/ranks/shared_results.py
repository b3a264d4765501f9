"""For scripts that run on every rank: rank 0 executes each call, and all ranks get the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from ostinato.ranks.plan_message import Kind, to_words
from ostinato.ranks.result_message import decode_result, encode_error, encode_result
from ostinato.ranks.steps import FollowingRunner
from ostinato.ranks.watch.interrupts import uninterrupted
from ostinato.ranks.world import World

T = TypeVar("T")


class _Sharing(ABC):
    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which only rank 0 runs."""

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Rank 0's ``items``, one at a time; an item must not be None."""
        while (item := self.call(lambda: next(items, None))) is not None:
            yield item


class SharingLeader(_Sharing):
    """Rank 0, if all ranks run the script."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call(self, function: Callable[[], T]) -> T:
        try:
            result = function()
            message = encode_result(result)
        except BaseException as error:
            if not self._world.failed:  # otherwise they already know
                self._share(encode_error(error))
            raise
        self._share(message)
        return result

    def _share(self, message: bytes) -> None:
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(Kind.RESULT, to_words(message))


class SharingFollower(_Sharing):
    """Any other rank, if all ranks run the script."""

    def __init__(self, runner: FollowingRunner) -> None:
        self._runner = runner

    def call(self, function: Callable[[], T]) -> T:
        message = self._runner.follow()
        assert message is not None, "rank 0 has not left: all ranks run the same script"
        result: T = decode_result(message)
        return result
