"""A time limit for Python code that is not ours and may not end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Stopped(BaseException):
    """Raised in code that took too long, where no ``except Exception`` of its own catches it."""


def within_seconds(limit: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, or TimeoutError after ``limit`` seconds.

    It runs in a thread of its own. After the limit, or when the caller is interrupted, that thread
    is told to stop, which it does at its next line of Python.
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
