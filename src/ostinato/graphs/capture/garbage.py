"""Pauses Python's garbage collector, which would free device objects in the middle of a capture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _PausedCollection:
    """Keeps Python's garbage collector, shared by all threads, off while any of them captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._was_enabled:
                gc.enable()


_paused_collection = _PausedCollection()


@contextmanager
def garbage_collection_paused(*, generation: int | None) -> Iterator[None]:
    """Collect garbage up to ``generation``, then keep the collector off inside."""
    if generation is not None:
        gc.collect(generation)
    _paused_collection.enter()
    try:
        yield
    finally:
        _paused_collection.leave()
