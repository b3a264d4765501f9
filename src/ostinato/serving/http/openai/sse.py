"""Server-sent events: one JSON object per event, ``[DONE]`` after the last."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ostinato.serving.http.errors import api_error

_DONE = b"data: [DONE]\n\n"
_LAST_WORDS_S = 5.0  # beyond the deadline, for the event that says that it has passed

_log = logging.getLogger("ostinato.serving")


class OwnedStream(StreamingResponse):
    """Sends ``content``, and closes ``resources`` however the response ends.

    It ends soon after ``deadline``, a time of the loop, also if the client no longer reads: sending
    waits for that, and would hold the resources as long as the connection lasts.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        resources: AsyncExitStack,
        *,
        deadline: float,
        **options: Any,
    ) -> None:
        super().__init__(content, **options)
        self._resources = resources
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            limit = asyncio.timeout_at(self._deadline + _LAST_WORDS_S)
            try:
                async with limit:
                    await super().__call__(scope, receive, send)
            except TimeoutError:
                if not limit.expired():
                    raise
                _log.warning(
                    "broke off an answer whose client did not read it in time (--request-timeout-s)"
                )


class EventStream(OwnedStream):
    """An ``OwnedStream`` of ``events``.

    An error after the start becomes the last event, since the status has been sent. ``lines``
    writes the events, if not as most routes do.
    """

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        resources: AsyncExitStack,
        *,
        deadline: float,
        lines: Callable[[AsyncIterator[dict[str, Any]]], AsyncIterator[bytes]] | None = None,
    ) -> None:
        super().__init__(
            (lines or _lines)(events),
            resources,
            deadline=deadline,
            media_type="text/event-stream",
            # Proxies must not collect the events.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def _lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield _line(event)
    except Exception as error:
        yield _line(api_error(error).body)
    yield _DONE


async def named_lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Events named by their types, as ``/v1/responses`` has them; the last of them is the end."""
    async for event in events:
        yield f"event: {event['type']}\n".encode() + _line(event)


def error_lines(error: dict[str, Any], *, named: bool) -> bytes:
    """The end of a stream that breaks off; ``named``: as ``/v1/responses`` has it."""
    if not named:
        return _line({"error": error}) + _DONE
    what = {name: error[name] for name in ("message", "code", "param")}
    return b"event: error\n" + _line({"type": "error", **what})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
