"""What all graph pools of one CUDA device have in common, and the stream that each has alone.

In common: captures are made one at a time, and graphs and pools are not destroyed during one.
Alone: the capture stream, because torch's cuBLAS workspaces go by stream. A captured GEMM that is
split along its inner dimension writes to the workspace of the stream it was captured on, so graphs
that may be replayed at the same time must not share one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ostinato.graphs.backends.cuda.bindings import own_stream


class CaptureStream:
    """A stream to capture on, with the cuBLAS workspace that graphs captured there write to.

    torch gives every stream that runs a GEMM a workspace (32 MiB on Hopper) and keeps it; graphs
    hold its address for good. So it lives in memory of its own, which nothing else is placed in
    even if torch is told to drop its workspaces.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = own_stream(device)
        self._workspaces = torch.cuda.MemPool()

    def prepare_blas(self) -> None:
        """Have handle and workspace ready: cuBLAS cannot be initialised inside a capture.

        Each thread has a handle of its own, and each handle its workspace. torch's cuBLASLt calls
        use the same one (TORCH_CUBLASLT_UNIFIED_WORKSPACE, on by default).
        """
        with torch.cuda.use_mem_pool(self._workspaces):
            torch.cuda.current_blas_handle()


class StreamLease:
    """A capture stream for as long as anything refers to the lease: a pool, or one of its graphs.

    Then the stream, with its workspace, is for the next pool.
    """

    def __init__(self, held: CaptureStream, give_back: Callable[[CaptureStream], None]) -> None:
        self.stream = held.stream
        self.prepare_blas = held.prepare_blas
        finalizer = weakref.finalize(self, give_back, held)
        finalizer.atexit = False  # there is no next pool


class CaptureDevice:
    """One CUDA device as its graph pools share it. Made once per device, and kept."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()  # held by the one capture that is going on
        self.capturing = False  # from before torch begins a capture until after it has ended it
        self.draws = DrawOrder(device)
        self._device = device
        self._free: list[CaptureStream] = []
        self._retired: list[Callable[[], object]] = []

    def lease_stream(self) -> StreamLease:
        """A capture stream that no living pool or graph uses. Synchronises if it was used before:
        the last replays of its graphs may still be writing to its workspace."""
        with self.lock, torch.cuda.device(self._device):
            if not self._free:
                return StreamLease(CaptureStream(self._device), self._free.append)
            torch.cuda.synchronize(self._device)
            return StreamLease(self._free.pop(), self._free.append)

    @contextmanager
    def capture_under_way(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """torch captures on ``stream`` inside; the lock is held."""
        with self.draws.held(stream):
            outer, self.capturing = self.capturing, True
            try:
                yield
            finally:
                self.capturing = outer

    def synchronize(self) -> None:
        """Wait for the device, but not during a capture: CUDA would give that capture up."""
        with self.lock:
            torch.cuda.synchronize(self._device)

    def dispose(self, destroy: Callable[[], object]) -> None:
        """Call ``destroy``, which ends a graph or a memory pool, now or after the capture at hand.

        A pool that dies during a capture ends the process (an assertion in torch), and Python may
        drop the last reference at any time.
        """
        self._retired.append(destroy)
        if not self.capturing and self.lock.acquire(blocking=False):
            try:
                while self._retired:
                    self._retired.pop(0)()
            finally:
                self.lock.release()


class DrawOrder:
    """Puts captures, and replays of graphs that draw random numbers, in one order on the device.

    Before torch 2.13 a graph is told where to go on in the sequence through memory of the
    generator, which all graphs that draw from it read. torch writes there when a capture begins and
    when such a graph is replayed, on the stream of either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def held(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """What is enqueued on ``stream`` inside comes after the last, and before the next."""
        with self._lock:
            if self._last is None:
                self._last = torch.cuda.Event()
            else:
                stream.wait_event(self._last)
            try:
                yield
            finally:
                self._last.record(stream)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay on the current stream, in this order."""
        with self.held(torch.cuda.current_stream(self._device)):
            graph.replay()


_devices: dict[torch.device, CaptureDevice] = {}
_making_devices = threading.Lock()


def capture_device(device: torch.device) -> CaptureDevice:
    """The one of ``device``, which has an index."""
    with _making_devices:
        if device not in _devices:
            _devices[device] = CaptureDevice(device)
        return _devices[device]
