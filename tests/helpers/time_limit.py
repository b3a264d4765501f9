"""A time limit for third-party Python code that may not terminate."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Stopped(BaseException):
    """Raised in code that took too long; not an Exception, so that it is not caught there."""


def within_seconds(limit: float, call: Callable[[], T]) -> T:
    """Return or raise what ``call`` does, or raise TimeoutError after ``limit`` seconds.

    It runs in a separate thread. After the limit, or when the caller is interrupted, that thread is
    told to stop, which it does at its next line of Python.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ostinato-time-limit", daemon=True)
    thread.start()
    try:
        thread.join(limit)
    finally:
        if thread.is_alive():
            _stop(thread)
    if errors and not isinstance(errors[0], _Stopped):
        raise errors[0]
    if results:
        return results[0]
    raise TimeoutError(f"no result after {limit:g} s")


def _stop(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
    )
