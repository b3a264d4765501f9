"""Runs the server until a signal: drains or aborts, then closes the model."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.quoting import said, shown
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.http.telemetry.trace_export import open_tracing
from ostinato.serving.switch_interval import short_switch_interval

_log = logging.getLogger("ostinato.serving")

# Longer than clients keep idle connections (httpx, and so OpenAI's: 5 s), so that the client
# closes first: a request that meets a closing server gets a reset instead of an answer.
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 5  # for the errors of requests that a shutdown has aborted

Abort = Callable[[], Awaitable[object]]


class _Server(uvicorn.Server):
    """The first SIGTERM or SIGINT shuts down within the limit, the second ends the process.

    ``abort`` ends, ``limit_s`` after the first, requests that run with an error of their own.
    uvicorn cancels what is left some time later, which breaks streams off.
    """

    def __init__(self, config: uvicorn.Config, *, limit_s: float, abort: Abort | None) -> None:
        super().__init__(config)
        self._limit_s = limit_s
        self._abort = abort

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        has_ended = asyncio.Event()
        aborting = asyncio.create_task(self._abort_in_time(has_ended))
        await super().shutdown(sockets)
        has_ended.set()
        await aborting

    async def _abort_in_time(self, has_ended: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(has_ended.wait(), self._limit_s)
        except TimeoutError:
            if self._abort is not None:
                await self._abort()

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
    check_address(config.host, config.port)  # a large model takes minutes to load
    with (
        open_tracing(config.otlp_traces_endpoint) as tracer_provider,
        short_switch_interval(),
        AsyncLLM.from_config(engine) as llm,
    ):
        asyncio.run(load_adapters(llm, adapters or {}))
        listen(create_app(llm, config, tracer_provider), config, abort=llm.aclose)


def listen(app: FastAPI, config: ServerConfig, *, abort: Abort | None = None) -> None:
    """Run ``app`` until a signal. Its ``state.admission`` takes no more requests then.

    ``abort``: what ends its requests when the time for them is over.
    """
    if config.is_exposed:
        _log.warning("other machines may connect to %s without a key", config.host)
    limit_s = config.shutdown_timeout_s
    hard_limit_s = max(1, round(limit_s)) if abort is None else round(limit_s) + _LAST_WORDS_S
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http="h11",  # httptools, where it is installed, takes headers of any size
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=hard_limit_s,
            server_header=False,
            log_level="info",
        ),
        limit_s=limit_s,
        abort=abort,
    )
    server.run()
    if not server.started:
        sys.exit(1)  # uvicorn has said why


def check_address(host: str, port: int) -> None:
    """Raise if the server could not listen there, as far as that can be known beforehand."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failures = [error for each in found if (error := _probe(each)) is not None]
    except (OSError, UnicodeError) as error:
        raise _no_address(host, port, error) from None
    for failure in failures:
        # A machine may lack one family of the addresses that a name has.
        if failure.errno in (errno.EADDRINUSE, errno.EACCES) or len(failures) == len(found):
            raise _no_address(host, port, failure)


def _probe(found: tuple[Any, ...]) -> OSError | None:
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _no_address(host: str, port: int, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or said(error)
    return ConfigError(
        f"the server cannot listen on {shown(host)}, port {port}: {why}; choose others with --host "
        "and --port"
    )


async def load_adapters(llm: AsyncLLM, adapters: Mapping[str, str | Path]) -> None:
    """Load LoRA adapters by name."""
    for name, path in adapters.items():
        await llm.load_adapter(name, path)
