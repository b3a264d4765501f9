"""``AsyncStream``: the text of one request, as an event loop reads it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

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

    async def start(self) -> None:
        """Read and check the request, and hand it to the engine. Raises what is wrong with it."""
        if self._request is None and not self._ended:
            await self._start()

    async def _start(self) -> None:
        request = await self._prepare()
        if self._ended:
            return  # closed by another task in the meantime
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
        await self.start()
        if self._ended or self._request is None:
            raise StopAsyncIteration
        try:
            item = await self._request.queue.get()
        except BaseException:
            await self.aclose()
            raise
        if item is None:
            self._ended = True
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Abort the request, if it has not ended. Waits for nothing; closing twice is harmless."""
        self._abort()

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
