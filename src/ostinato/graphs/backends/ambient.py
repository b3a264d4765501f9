"""The torch state that every capture runs under, regardless of the caller's settings."""

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
from ostinato.graphs.thread_state import SharedSwitch, thread_variable


class _Captures:
    """Numbers the captures of all threads, so that one can tell whether it ran alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest = 0
        self.in_progress = SharedSwitch()

    def next_number(self) -> int:
        """A number for a capture in progress that begins; 0 if there are others."""
        with self._lock:
            self.newest += 1
            return self.newest if self.in_progress.num_holds == 1 else 0


_captures = _Captures()
_in_capture: ContextVar[int | None] = thread_variable("in_capture", None)


def in_capture() -> bool:
    """Whether this thread is inside a capture (recording, between recordings, or warming up), or
    tries a graph that it captured.

    On a GPU no other thread of the process can start a capture during one.
    """
    return _in_capture.get() is not None


def others_captured_meanwhile() -> bool:
    """Whether captures of other threads overlap the one that this thread is inside.

    They advance the default random generators and put them back, which are those of all threads.
    """
    number = _in_capture.get()
    return number is not None and number != _captures.newest


@contextmanager
def among_captures() -> Iterator[None]:
    """Count what runs inside as a capture, for captures of other threads."""
    if in_capture():
        yield
        return
    with _captures.in_progress.held():
        outer = _in_capture.set(_captures.next_number())
        try:
            yield
        finally:
            _in_capture.reset(outer)


@contextmanager
def capture_ambient() -> Iterator[None]:
    """Disable autograd and autocast's cache.

    Autocast caches the cast copy of a parameter until its context ends. A copy made in one capture
    would be read by the next one, which would then not contain the cast.
    """
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with among_captures(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


_recording: ContextVar[bool] = thread_variable("recording", False)


@contextmanager
def answering_as_a_capture() -> Iterator[None]:
    """Make ``torch.cuda.is_current_stream_capturing()`` return true in this thread.

    Libraries ask it before they read values on the host; transformers does so for attention masks.
    """
    _teach_torch_to_answer()
    outer = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(outer)


@cache
def _teach_torch_to_answer() -> None:
    compat.answer_for_captures(_recording.get)


class _ForceEager:
    """torch's stance on compiled functions, which is global to all threads."""

    def __init__(self) -> None:
        self._previous: Any = None

    def enter(self) -> None:
        self._previous = compat.compile_stance.find()
        try:
            torch.compiler.set_stance("force_eager")
        except RuntimeError as error:
            self._previous = None
            raise CaptureError(
                "a capture was started inside a function that torch.compile runs, where compiled "
                "code cannot be recorded; run it once before, outside that function, so that it "
                "captures there"
            ) from error

    def leave(self) -> None:
        if self._previous is not None:
            compat.set_compile_stance.demand()(self._previous)
            self._previous = None


_stance = _ForceEager()
_force_eager = SharedSwitch(_stance.enter, _stance.leave)


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """Disable torch.compile, if it is in use.

    The code it generates for the CPU calls no operators, so a recording would not see it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it is slow
        yield
        return
    with _force_eager.held():
        yield
