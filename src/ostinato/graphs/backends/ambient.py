"""The torch state that every capture runs under, whatever the caller had set."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from ostinato import compat
from ostinato.errors import CaptureError

_in_capture: ContextVar[bool] = ContextVar("ostinato_in_capture", default=False)


def in_capture() -> bool:
    """Whether this thread is in a capture, also between its recordings, or warms up for one.

    On a GPU no other thread of the process can begin one meanwhile.
    """
    return _in_capture.get()


@contextmanager
def capture_ambient() -> Iterator[None]:
    """No autograd, and no cache of autocast.

    Autocast keeps the cast copy of a parameter until it is left. Made in one capture, the copy
    would be read by the next one, which would not contain the cast.
    """
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    outer = _in_capture.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _in_capture.reset(outer)
        torch.set_autocast_cache_enabled(caching)


class _ThisThread(threading.local):
    recording = False


_this_thread = _ThisThread()


@contextmanager
def answering_as_a_capture() -> Iterator[None]:
    """While it lasts, ``torch.cuda.is_current_stream_capturing()`` is true in this thread.

    It is the question by which code finds out that it must not look at values; transformers asks
    it before it reads an attention mask.
    """
    _teach_torch_to_answer()
    outer, _this_thread.recording = _this_thread.recording, True
    try:
        yield
    finally:
        _this_thread.recording = outer


@cache
def _teach_torch_to_answer() -> None:
    compat.answer_for_captures(lambda: _this_thread.recording)


class _ForceEager:
    """torch's stance on compiled functions, which all threads share.

    Captures of several threads may overlap in any order (ranks that take turns do), so the first
    one changes it and the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._stance = _eager_stance()
                self._stance.__enter__()
            self._depth += 1

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._stance.__exit__(None, None, None)


def _eager_stance() -> Any:
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise CaptureError(
            "a capture was started by a function that torch.compile runs, where compiled code "
            "cannot be seen; call what captures once before, outside of it"
        ) from error


_force_eager = _ForceEager()


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """torch.compile out of the way, if it is in use at all.

    The code it generates for the CPU calls no operators, and would be invisible to a recording.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and importing it is slow
        yield
        return
    _force_eager.enter()
    try:
        yield
    finally:
        _force_eager.leave()
