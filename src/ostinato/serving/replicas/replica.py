"""``Replica``: one engine with its routes, in a Ray Serve actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray import serve

from ostinato.config import EngineConfig
from ostinato.errors import EngineFailedError
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.http.app import create_app
from ostinato.serving.http.run import load_adapters
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.http.telemetry.trace_export import open_tracing
from ostinato.serving.replicas.prompt_prefix import PromptPrefix

Message = dict[str, Any]  # of ASGI


class ReplicaFailedError(EngineFailedError):
    """The engine of ``replica`` failed; Ray will start another."""

    def __init__(self, message: str, replica: str) -> None:
        super().__init__(message, replica)
        self.replica = replica

    def __str__(self) -> str:
        return str(self.args[0])


class Replica:
    """Answers requests as the server without replicas does: the routes are the same."""

    def __init__(
        self, engine: EngineConfig, config: ServerConfig, adapters: Mapping[str, str | Path]
    ) -> None:
        self._llm = AsyncLLM.from_config(engine)
        with ThreadPoolExecutor(1) as pool:  # this thread has Ray's loop
            pool.submit(asyncio.run, load_adapters(self._llm, adapters)).result()
        self._tracing = open_tracing(config.otlp_traces_endpoint)
        self._app = create_app(self._llm, config, self._tracing.__enter__())
        self._name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self._llm.failure is not None:
            raise EngineFailedError(self._llm.failure)

    async def answer(
        self,
        scope: dict[str, Any],
        body: bytes,
        *,
        prefix: PromptPrefix,
        avoided: frozenset[str],
        number: int | None,
    ) -> AsyncIterator[Message]:
        """The messages of the answer.

        The rest is for the router: the ``prefix`` that may be cached somewhere, names of replicas
        to be ``avoided``, or the ``number`` of the one to ask.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._run(scope, body, messages))
        try:
            while (message := await messages.get()) is not None:
                failure = self._llm.failure
                if message.get("status") == 503 and failure is not None:
                    raise ReplicaFailedError(failure, self._name)
                yield message
            await answering
        finally:  # even if the client has left: that aborts the request
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _run(
        self, scope: dict[str, Any], body: bytes, messages: asyncio.Queue[Message | None]
    ) -> None:
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # until this task is cancelled
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.put_nowait(dict(message))

        try:
            await self._app(scope, receive, send)
        finally:
            messages.put_nowait(None)

    async def __del__(self) -> None:
        await self._llm.aclose()
        self._tracing.__exit__(None, None, None)
