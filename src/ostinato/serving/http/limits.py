"""What keeps the server usable under load: a bounded queue, a time limit, callers that left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from fastapi import Request

from ostinato.serving.http.errors import ApiError

T = TypeVar("T")

_RETRY_AFTER_S = 1


class Admission:
    """Counts the sequences of all requests, and refuses those beyond ``most``. For one loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_inside = 0
        self.is_closing = False

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[None]:
        """Count sequences from here to the end of the block, or raise 429.

        A server without any takes every request: its own limit holds for that.
        """
        if self.is_closing:
            raise ApiError(503, "the server is shutting down; try another one", code="closing")
        if self.num_inside and self.num_inside + num_sequences > self._most:
            raise ApiError(
                429,
                f"the queue is full: {self.num_inside} sequences run or wait, of at most "
                f"{self._most}; try again later",
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        self.num_inside += num_sequences
        try:
            yield
        finally:
            self.num_inside -= num_sequences


@asynccontextmanager
async def time_limit(deadline: float, seconds: float) -> AsyncIterator[None]:
    """Raise 504 in the block at ``deadline``, a time of the loop, ``seconds`` after the start."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise ApiError(
            504,
            f"the request took longer than {seconds:g} s and was aborted; ask for fewer tokens, or "
            "raise --request-timeout-s",
            code="timeout",
            headers={"x-should-retry": "false"},  # OpenAI's clients would try again
        ) from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, unless the client disconnects: that cancels it."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client has left", code="client_closed_request")
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
