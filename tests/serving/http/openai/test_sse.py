"""Streams of events: what they hold is free in the end, whatever the client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("fastapi")

from ostinato.serving.http.openai import sse


def test_a_client_that_does_not_read_holds_nothing_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sse, "_LAST_WORDS_S", 0.01)
    freed: list[str] = []

    async def events() -> AsyncIterator[dict[str, Any]]:
        yield {"number": 1}

    async def forever(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def answer() -> None:
        resources = AsyncExitStack()
        resources.callback(freed.append, "place in the queue")
        deadline = asyncio.get_running_loop().time()
        stream = sse.EventStream(events(), resources, deadline=deadline)
        await asyncio.wait_for(stream({"type": "http"}, forever, forever), 30)

    asyncio.run(answer())
    assert freed == ["place in the queue"]
    assert "--request-timeout-s" in caplog.text
