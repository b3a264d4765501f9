"""``AsyncStream``: the text of one request, as an event loop reads it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from ostinato.errors import ConcurrentUseError
from ostinato.outputs import CompletionOutput, RequestOutput, TextDelta
from ostinato.serving.engine_thread import EngineThread
from ostinato.serving.running_request import RunningRequest


class AsyncStream:
    """Yields the text that each step adds to a request; returned by ``AsyncLLM.stream``.

    The request starts with ``start()``, at the beginning of an ``async with``, or with the first
    delta. If the reader leaves the ``async with``, is cancelled while it waits, calls ``aclose()``
    or drops the stream, the request is aborted before the next step. One task reads it, in the loop
    that started it.
    """

    def __init__(
        self, thread: EngineThread, prepare: Callable[[], Awaitable[RunningRequest]]
    ) -> None:
        self._thread = thread
        self._prepare = prepare
        self._request: RunningRequest | None = None
        self._ended = False
        self._busy = False

    async def start(self) -> None:
        """Read and check the request, and hand it to the engine. Raises what is wrong with it."""
        self._begin_use()
        try:
            await self._start()
        finally:
            self._busy = False

    async def _start(self) -> None:
        if self._request is not None or self._ended:
            return
        request = await self._prepare()
        if self._is_over:
            return  # closed in the meantime
        self._thread.start(request)
        self._request = request
        try:
            await request.started
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except BaseException:
            self._ended = True
            raise

    @property
    def _is_over(self) -> bool:
        return self._ended

    @property
    def output(self) -> RequestOutput:
        """The request, once it has started, without what it generates."""
        request = self._request
        assert request is not None, "the stream has started"
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt.text,
            prompt_token_ids=request.prompt.token_ids,
            outputs=[],
            num_cached_tokens=request.num_cached_tokens,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        item = await self._next()
        assert isinstance(item, TextDelta)
        return item

    async def finish(self) -> RequestOutput:
        """Wait for the end of a request that reports only ends; the whole output."""
        await self.start()
        ended: list[CompletionOutput] = []
        try:
            while True:
                item = await self._next()
                assert isinstance(item, CompletionOutput)
                ended.append(item)
        except StopAsyncIteration:
            output = self.output
            output.outputs = sorted(ended, key=lambda each: each.index)
            return output

    async def _next(self) -> TextDelta | CompletionOutput:
        self._begin_use()
        try:
            await self._start()
            if self._ended or self._request is None:
                raise StopAsyncIteration
            try:
                item = await self._request.queue.get()
            except BaseException:
                self._abort()
                raise
        finally:
            self._busy = False
        if item is None:
            self._ended = True
            raise StopAsyncIteration
        return item

    def _begin_use(self) -> None:
        """Refuse a second reader, which would wait for ever or miss what the first one gets."""
        if self._busy:
            raise ConcurrentUseError(
                "two tasks read one stream at the same time; give each its own, from another call "
                "of AsyncLLM.stream(), or pass the deltas on in one task"
            )
        if self._request is not None and not self._request.queue.is_of_running_loop:
            raise ConcurrentUseError(
                "a stream is read in another event loop than the one that started it; read it there"
            )
        self._busy = True

    async def aclose(self) -> None:
        """Abort the request, if it has not ended. Waits for nothing; closing twice is harmless.

        Another task that reads the stream meets its end.
        """
        self._abort()
        if self._busy and self._request is not None:
            queue = self._request.queue
            with suppress(RuntimeError):  # its loop is closed, and the reader gone with it
                queue.loop.call_soon_threadsafe(queue.end)

    def _abort(self) -> None:
        if not self._ended:
            self._ended = True
            if self._request is not None:
                self._thread.abort(self._request)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._abort()
