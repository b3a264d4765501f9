"""Renders chat templates in a separate process, within limits that the kernel enforces.

A template is a program that comes with a model. jinja's sandbox keeps it from files and from
Python's internals, but not from ``'x' * 10**12``, ``9**9**9`` or endless loops, and another thread
can neither interrupt nor measure a call into C. A process can be killed, and its memory limited. It
starts with the first conversation, in a tenth of a second, and is kept: after that a rendering
costs one round trip.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.errors import ClosedError, RequestError
from ostinato.quoting import said, shown

# Legitimate templates take a millisecond and a few times the memory of their text.
TIME_LIMIT_S = 10.0
MOST_BYTES = 200 * 2**20  # besides the messages; Linux only
LONGEST_TEXT = 2**25  # in characters: longer than the context of any model
_START_S = 60.0
_WORKER = Path(__file__).with_name("template_worker.py")
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)
_YOURSELF = "render the messages yourself and use generate()"


class TemplateProcess:
    """A process that renders templates, started when first needed; for one thread at a time.

    It ends with ``close()``, with this object, and with this process however that ends.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._closed = False

    def render(self, template: str, variables: Mapping[str, Any], name: str) -> str:
        """Render ``template`` with ``variables``, which errors call ``name``."""
        kind, detail = self._answer(template, variables, name)
        if kind == "too long":
            raise RequestError(
                f"the model's chat template turns {name} into {int(detail):,} characters, above "
                f"the limit of {LONGEST_TEXT:,}; shorten the messages, or {_YOURSELF}"
            )
        assert kind == "text"
        return str(detail)

    def variables_read(self, template: str, name: str) -> frozenset[str]:
        """The names of all variables that ``template`` may read from those it is given."""
        kind, detail = self._answer(template, None, name)
        assert kind == "names"
        return frozenset(detail)

    def close(self) -> None:
        """End the process. Closing twice is harmless."""
        self._closed = True
        self._end()

    def _answer(
        self, template: str, variables: Mapping[str, Any] | None, name: str
    ) -> tuple[str, Any]:
        if self._closed:
            raise ClosedError("the LLM is closed; build a new one")
        line = _as_json({"template": template, "variables": variables}, name)
        kind, detail = self._ask(line, name)
        if kind == "error":
            raise RequestError(
                f"the model's chat template cannot render {name}: {said(detail)}; change the "
                f"messages or chat_template_kwargs, or {_YOURSELF}"
            )
        if kind == "memory":
            self._end()  # it may have kept some of it
            raise RequestError(
                f"the model's chat template takes more than {MOST_BYTES // 2**20} MiB of memory "
                f"for {name}; {_YOURSELF}"
            )
        return kind, detail

    def _ask(self, line: bytes, name: str) -> tuple[str, Any]:
        running = self._start()
        try:
            return running.ask(line, TIME_LIMIT_S)
        except TimeoutError:
            self._end()
            raise RequestError(
                f"the model's chat template did not end within {TIME_LIMIT_S:g} s for {name}; "
                f"{_YOURSELF}"
            ) from None
        except OSError:
            self._end()
            raise RequestError(
                f"the model's chat template ended the process that renders {name} "
                f"({running.ending()}); {_YOURSELF}"
            ) from None
        except BaseException:  # interrupted: the next request must not get this answer
            self._end()
            raise

    def _start(self) -> _Running:
        if self._running is None or not self._running.usable:
            self._end()
            try:
                self._running = _Running()
            except OSError as error:
                raise RequestError(
                    f"the process that renders chat templates could not be started "
                    f"({said(error)}); free memory, raise the limit of processes (ulimit -u), or "
                    f"{_YOURSELF}"
                ) from error
        return self._running

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()


class _Running:
    """The process, started and ready, and the connection to it."""

    def __init__(self) -> None:
        self._connection, there = socket.socketpair()
        with there:
            try:
                self._process = subprocess.Popen(
                    # -I: neither the current directory nor the environment has modules for it.
                    [sys.executable, "-I", str(_WORKER)],
                    stdin=there.fileno(),
                    stdout=there.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            except BaseException:
                self._connection.close()
                raise
        self.end = weakref.finalize(self, _end, self._process, self._connection, os.getpid())
        self._pid = os.getpid()
        settings = {
            "path": [path or os.getcwd() for path in sys.path],
            "most_bytes": MOST_BYTES,
            "most_seconds": TIME_LIMIT_S,
            "longest_text": LONGEST_TEXT,
        }
        try:
            self.ask(json.dumps(settings).encode() + b"\n", _START_S)
        except BaseException:
            self.end()
            raise

    @property
    def usable(self) -> bool:
        """Whether it is alive and belongs to this process: a fork has to start its own."""
        return self._pid == os.getpid() and self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> tuple[str, Any]:
        """The answer to a line: its kind, and a detail. TimeoutError after ``seconds``."""
        deadline = time.monotonic() + seconds
        self._connection.settimeout(seconds)
        self._connection.sendall(line, _FLAGS)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._connection.recv(2**16)
            if not part:
                raise ConnectionError("it was closed")
            answer += part
        kind, detail = json.loads(answer)
        return kind, detail

    def ending(self) -> str:
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    connection.close()
    if owner == os.getpid():  # and not a fork of it
        process.kill()
        process.wait()


def _as_json(request: Mapping[str, Any], name: str) -> bytes:
    try:
        return json.dumps(request, default=_plain).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{name} cannot be given to the model's chat template: {said(error)}; messages hold "
            "text, numbers, lists and dicts"
        ) from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{shown(value)} is none of them")
