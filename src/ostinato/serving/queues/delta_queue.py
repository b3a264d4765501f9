"""``DeltaQueue``: carries what the engine's thread has for one request to the loop that waits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ostinato.errors import OstinatoError

T = TypeVar("T")


class DeltaQueue(Generic[T]):
    """A queue with one reader. All methods run in the thread of ``loop``.

    The engine's thread has ``put``, ``fail`` and ``end`` called there, once per step for all
    queues of a loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[T] = deque()
        self._error: OstinatoError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_of_running_loop(self) -> bool:
        return asyncio.get_running_loop() is self.loop

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._wake()

    def fail(self, error: OstinatoError) -> None:
        """Raise ``error`` in the reader, after what is already in the queue."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> T | None:
        """The next item; None at the end."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()
