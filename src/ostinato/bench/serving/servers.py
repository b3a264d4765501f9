"""Servers that a benchmark starts and ends: Ostinato's own, and ``transformers serve``.

Each is a process of its own that listens on 127.0.0.1, at a port that was free. What it prints goes
to a file, and the end of that into the error if it does not start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from ostinato.config import EngineConfig
from ostinato.errors import MeasurementError
from ostinato.loading.default_model.embedded import embedded_model_path
from ostinato.serving.http.server_config import ServerConfig

HOST = "127.0.0.1"

_START_S = 900.0  # a first start compiles and tunes
_STOP_S = 10.0
_LOG_CHARS = 1500


class Server(ABC):
    """A server that runs. ``extra``: what makes it generate as many tokens as a request asks for,
    and say how many those were."""

    name: str
    extra: dict[str, Any]

    def __init__(self, log: Path) -> None:
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = log

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None:
        """End the process; by force, if it takes too long."""

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if not self.is_alive() or time.monotonic() > deadline:
                why = "did not answer in time" if self.is_alive() else "ended"
                end = self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
                raise MeasurementError(f"the server {self.name} {why}; it printed:\n{end}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=5) as client:
            return client.get(f"{self.url}/health").is_success
        return False


class Ostinato(Server):
    """``ostinato serve``, with the options of this run."""

    name = "ostinato"
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True}}

    def __init__(self, log: Path, config: EngineConfig, *, max_waiting: int) -> None:
        super().__init__(log)
        server = ServerConfig(host=HOST, port=self.port, max_waiting=max_waiting)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(config, server, str(log))
        )

    def start(self) -> None:
        self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Transformers(Server):
    """``transformers serve`` of the same checkpoint, one request after the other.

    Without end-of-text tokens, so that it generates as many tokens as asked.
    """

    name = "transformers"
    options: tuple[str, ...] = ()
    extra = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1})}

    def __init__(self, log: Path, config: EngineConfig) -> None:
        super().__init__(log)
        device = config.torch_device()
        dtype = str(config.torch_dtype(device)).removeprefix("torch.")  # "auto" may differ there
        self._command = [
            *(sys.executable, "-c", _TRANSFORMERS, "serve", str(checkpoint(config))),
            *("--host", HOST, "--port", str(self.port), "--device", device.type),
            *("--dtype", dtype, *self.options),
        ]

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TransformersBatching(Transformers):
    """The same with its continuous batching."""

    name = "transformers-cb"
    options = ("--continuous-batching",)


# What the command `transformers` runs; it may not be on the path of this interpreter.
_TRANSFORMERS = "from transformers.cli.transformers import main; main()"

BASELINES = {each.name: each for each in (Transformers, TransformersBatching)}


def build_baseline(name: str, config: EngineConfig, log: Path) -> Server:
    return BASELINES[name](log, config)


@contextmanager
def running(build: Callable[[Path], Server]) -> Iterator[Server]:
    """A server that answers, until the end of the ``with``."""
    with TemporaryDirectory(prefix="ostinato-bench-") as directory:
        server = build(Path(directory) / "log.txt")
        server.start()
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def _serve(config: EngineConfig, server: ServerConfig, log: str) -> None:
    """In the new process: everything printed goes to the file."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from ostinato.serving.http.run import serve  # needs FastAPI

    serve(config, server)


def checkpoint(config: EngineConfig) -> Path:
    """The directory that transformers loads."""
    if config.random_weights:
        raise MeasurementError("transformers serve needs a checkpoint, and the weights are random")
    if config.model is None:
        return embedded_model_path()
    return Path(config.model)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
