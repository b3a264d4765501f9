"""Counters for kernels whose programs count themselves: the last to arrive combines the parts.

A launch's counters are zero because the step that it is part of has zeroed them, never because an
earlier launch left them so. Hence engines, pools and streams share none, and a launch that failed
or was aborted leaves nothing behind for the next. The zeroing is enqueued on the same stream, ahead
of the launch and without overlap; the kernel counts after its wait.
"""

from __future__ import annotations

import torch

from ostinato.graphs.capture.segments import open_recording

# Int32 that one recording zeroes at once: more than the launches of most decode steps take between
# them, and small enough that its size does not show in the time of the memset.
SLAB_SIZE = 1 << 16
_ALIGNED = 32  # Triton compiles another kernel for an address that is not round


class CounterSlabs:
    """Counters of one recording on one device. Launches have disjoint slices of a slab.

    The recording holds it, so nothing else of the same recording is placed on it. Afterwards other
    graphs of the pool may: they never run at the same time, and every replay zeroes its own first.
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


def take_counters(device: torch.device, count: int) -> torch.Tensor:
    """``count`` int32 zeros for one launch, enqueued ahead of it on the current stream.

    In a recording of ours one memset serves many launches, in all segments of the recording. In a
    capture by others, and eagerly, each launch has a memset of its own.
    """
    recording = open_recording()
    if recording is None or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _zeros(count, device)
    return recording.kept((CounterSlabs, device), lambda: CounterSlabs(device)).take(count)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, device=device, dtype=torch.int32)
