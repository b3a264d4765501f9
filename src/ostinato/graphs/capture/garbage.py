"""Pauses Python's garbage collector, which would free device objects in the middle of a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.graphs.thread_state import SharedSwitch


class _Collector:
    """Python's garbage collector, which all threads share."""

    def __init__(self) -> None:
        self._was_enabled = False

    def pause(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def resume(self) -> None:
        if self._was_enabled:
            gc.enable()


_collector = _Collector()
_paused = SharedSwitch(_collector.pause, _collector.resume)


@contextmanager
def garbage_collection_paused(*, generation: int | None) -> Iterator[None]:
    """Collect garbage up to ``generation``, then keep the collector off inside."""
    if generation is not None:
        gc.collect(generation)
    with _paused.held():
        yield
