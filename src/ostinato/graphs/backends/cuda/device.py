"""State shared by all graph pools of one CUDA device, and each pool's own capture stream.

Shared: captures run one at a time, and graphs and pools are not destroyed during one. Separate: the
capture stream, because torch keeps one cuBLAS workspace per stream. A captured split-K GEMM writes
to the workspace of its capture stream, so graphs that may replay concurrently must not share one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ostinato.graphs.backends.cuda.bindings import own_stream


class CaptureStream:
    """A capture stream, with the cuBLAS workspace that graphs captured on it write to.

    torch gives every stream that runs a GEMM a workspace (32 MiB on Hopper) and keeps it; graphs
    hold its address permanently. So it is allocated in a private pool, where nothing else is placed
    even if torch is told to drop its workspaces.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = own_stream(device)
        self.workspaces = torch.cuda.MemPool()

    def prepare_blas(self) -> None:
        """Create the handle and workspace: cuBLAS cannot be initialised inside a capture.

        Each thread has its own handle, and each handle its own workspace. torch's cuBLASLt calls
        share it (TORCH_CUBLASLT_UNIFIED_WORKSPACE, on by default).
        """
        with torch.cuda.use_mem_pool(self.workspaces):
            torch.cuda.current_blas_handle()


class StreamLease:
    """Holds a capture stream as long as a pool or one of its graphs refers to the lease.

    Afterwards the stream and its workspace are reused by the next pool.
    """

    def __init__(self, held: CaptureStream, give_back: Callable[[CaptureStream], None]) -> None:
        self.stream = held.stream
        self.prepare_blas = held.prepare_blas
        self.workspace_pool: tuple[int, int] = held.workspaces.id
        finalizer = weakref.finalize(self, give_back, held)
        finalizer.atexit = False  # there will be no next pool


class CaptureDevice:
    """One CUDA device, shared by its graph pools. Created once per device and kept."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()  # held during a capture
        self.capturing = False  # from before torch begins a capture until after it ends
        self.draws = DrawOrder(device)
        self._device = device
        self._free: list[CaptureStream] = []
        self._retired: list[Callable[[], object]] = []

    def lease_stream(self) -> StreamLease:
        """A capture stream that no live pool or graph uses. Synchronises if it was used before:
        the last replays of its graphs may still be writing to its workspace."""
        with self.lock, torch.cuda.device(self._device):
            if not self._free:
                return StreamLease(CaptureStream(self._device), self._free.append)
            torch.cuda.synchronize(self._device)
            return StreamLease(self._free.pop(), self._free.append)

    @contextmanager
    def capture_under_way(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """torch captures on ``stream`` inside this context; the lock is held."""
        with self.draws.held(stream):
            outer, self.capturing = self.capturing, True
            try:
                yield
            finally:
                self.capturing = outer

    def synchronize(self) -> None:
        """Wait for the device, but not during a capture: CUDA would invalidate it."""
        with self.lock:
            torch.cuda.synchronize(self._device)

    def dispose(self, destroy: Callable[[], object]) -> None:
        """Call ``destroy``, which frees a graph or a memory pool, now or after the current capture.

        Destroying a pool during a capture aborts the process (an assertion in torch), and Python
        may drop the last reference at any time.
        """
        self._retired.append(destroy)
        if not self.capturing and self.lock.acquire(blocking=False):
            try:
                while self._retired:
                    self._retired.pop(0)()
            finally:
                self.lock.release()


class DrawOrder:
    """Orders captures and replays of graphs that draw random numbers on the device.

    Before torch 2.13, a graph reads its position in the random sequence from generator memory that
    is shared by all graphs drawing from it. torch writes there when a capture begins and when such
    a graph is replayed, on the respective stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def held(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Run work enqueued on ``stream`` after the previous holder's and before the next's."""
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
    """The shared state of ``device``, which must have an index."""
    with _making_devices:
        if device not in _devices:
            _devices[device] = CaptureDevice(device)
        return _devices[device]
