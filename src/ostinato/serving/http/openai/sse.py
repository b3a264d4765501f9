"""Server-sent events: one JSON object per event, ``[DONE]`` after the last."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ostinato.serving.http.errors import api_error

_DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends ``events``, and closes ``resources`` however the response ends.

    An error after the start becomes the last event, since the status has been sent. ``lines``
    writes the events, if not as most routes do.
    """

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        resources: AsyncExitStack,
        *,
        lines: Callable[[AsyncIterator[dict[str, Any]]], AsyncIterator[bytes]] | None = None,
    ) -> None:
        super().__init__(
            (lines or _lines)(events),
            media_type="text/event-stream",
            # Proxies must not collect the events.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


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


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
