"""Runs the server until a signal: drains or aborts, then closes the model."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ostinato.config import EngineConfig
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.http.telemetry.trace_export import open_tracing
from ostinato.serving.switch_interval import short_switch_interval

_log = logging.getLogger("ostinato.serving")

# Longer than clients keep idle connections (httpx, and so OpenAI's: 5 s), so that the client
# closes first: a request that meets a closing server gets a reset instead of an answer.
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """The first SIGTERM or SIGINT shuts down within the limit, the second ends the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own would raise the signals again at the end, before the model is closed.
        previous = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.config.app.state.admission.is_closing = True  # type: ignore[union-attr]
        self.should_exit = True


def serve(
    engine: EngineConfig, config: ServerConfig, adapters: Mapping[str, str | Path] | None = None
) -> None:
    """Build the model, load its adapters, and serve until a signal. In the main thread only."""
    with (
        open_tracing(config.otlp_traces_endpoint) as tracer_provider,
        short_switch_interval(),
        AsyncLLM.from_config(engine) as llm,
    ):
        asyncio.run(load_adapters(llm, adapters or {}))
        listen(create_app(llm, config, tracer_provider), config)


def listen(app: FastAPI, config: ServerConfig) -> None:
    """Run ``app`` until a signal. Its ``state.admission`` takes no more requests then."""
    if config.is_exposed:
        _log.warning("other machines may connect to %s without a key", config.host)
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
            server_header=False,
            log_level="info",
        )
    )
    server.run()
    if not server.started:
        sys.exit(1)  # uvicorn has said why


async def load_adapters(llm: AsyncLLM, adapters: Mapping[str, str | Path]) -> None:
    """Load LoRA adapters by name."""
    for name, path in adapters.items():
        await llm.load_adapter(name, path)
