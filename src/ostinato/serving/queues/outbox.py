"""``Outbox``: what the engine's thread has for event loops, handed over once per step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_Calls = list[tuple[Callable[[Any], object], Any]]


class Outbox:
    """Collects calls for each loop, in order. For one thread."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, _Calls] = {}

    def post(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], object], argument: Any
    ) -> None:
        """Have the loop call ``function`` with ``argument``, at the next ``flush``."""
        self._calls.setdefault(loop, []).append((function, argument))

    def post_result(self, future: asyncio.Future[Any], result: Any) -> None:
        """Set a future of a loop, unless its caller is gone by then."""
        self.post(future.get_loop(), _set_result, (future, result))

    def post_error(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """The same with an error."""
        self.post(future.get_loop(), _set_exception, (future, error))

    def flush(self) -> list[asyncio.AbstractEventLoop]:
        """Hand everything over without waiting; returns loops that are closed, if any."""
        closed = []
        while self._calls:
            loop, calls = self._calls.popitem()
            try:
                loop.call_soon_threadsafe(_call_each, calls)
            except RuntimeError:
                closed.append(loop)
        return closed


def _call_each(calls: _Calls) -> None:
    for function, argument in calls:
        function(argument)


def _set_result(to_set: tuple[asyncio.Future[Any], Any]) -> None:
    future, result = to_set
    if not future.done():
        future.set_result(result)


def _set_exception(to_set: tuple[asyncio.Future[Any], BaseException]) -> None:
    future, error = to_set
    if isinstance(error, StopIteration):  # a future takes every error but this one
        error, cause = RuntimeError(f"StopIteration was raised: {error}"), error
        error.__cause__ = cause
    if not future.done():
        future.set_exception(error)
