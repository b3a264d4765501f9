"""Counters for kernels in which the last program to arrive combines the partial results.

A launch's counters are zero because the current step zeroes them, never because an earlier launch
left them zero. So engines, pools and streams share none, and a launch that failed or was aborted
leaves nothing behind for the next. The memset is enqueued on the same stream, ahead of the launch
and without overlap; the kernel counts after its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ostinato.graphs.backends.base import unobserved
from ostinato.graphs.capture.segments import open_recording
from ostinato.graphs.thread_state import thread_variable

# Number of int32 that one recording zeroes at once: more than the launches of most decode steps
# need together, and small enough not to affect the duration of the memset.
SLAB_SIZE = 1 << 16
_ALIGNED = 32  # Triton compiles a separate kernel for unaligned addresses


class CounterSlabs:
    """Counters of one recording on one device. Launches get disjoint slices of a slab.

    The recording holds the slab, so nothing else in it is placed there. Later graphs of the pool
    may reuse its memory: they never run concurrently, and every replay zeroes its own first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[torch.Tensor] = []
        self._taken = 0

    def take(self, count: int) -> torch.Tensor:
        first = self._taken
        if not self._slabs or first + count > self._slabs[-1].shape[0]:
            self._slabs.append(_zeros(max(count, SLAB_SIZE), self._device))
            first = 0
        self._taken = first + -(-count // _ALIGNED) * _ALIGNED
        return self._slabs[-1][first : first + count]


_shared: ContextVar[CounterSlabs | None] = thread_variable("counters", None)


@contextmanager
def shared_counters(device: torch.device) -> Iterator[None]:
    """Inside, a capture that is not a recording of ours has one memset for many launches too."""
    token = _shared.set(CounterSlabs(device))
    try:
        yield
    finally:
        _shared.reset(token)


def take_counters(device: torch.device, count: int) -> torch.Tensor:
    """``count`` int32 zeros for one launch, enqueued ahead of it on the current stream.

    In one of our recordings a single memset serves many launches, in all segments. In another
    library's capture, and eagerly, each launch has its own memset.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _zeros(count, device)
    recording, slabs = open_recording(), _shared.get()
    if recording is not None:
        slabs = recording.kept((CounterSlabs, device), lambda: CounterSlabs(device))
    return _zeros(count, device) if slabs is None else slabs.take(count)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return unobserved(lambda: torch.zeros(count, device=device, dtype=torch.int32))
