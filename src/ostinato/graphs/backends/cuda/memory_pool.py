"""The memory of a backend's CUDA graphs."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from ostinato import compat
from ostinato.graphs.backends.cuda.device import CaptureDevice, StreamLease


class CudaMemoryPool:
    """A torch memory pool that stays usable.

    torch drops its bookkeeping of a pool when the pool's last graph dies, and can no longer capture
    into that pool. One tiny graph that lives as long as the pool prevents that. Capturing it also
    resets the random generator after an invalidated capture.
    """

    def __init__(self, device: torch.device, shared: CaptureDevice, lease: StreamLease) -> None:
        self.shared = shared
        self.lease = lease  # graphs keep their pool, and so the stream whose workspace they use
        self.memory = torch.cuda.MemPool()
        # torch's annotation is narrower than its actual use.
        self.handle = cast(Any, self.memory.id)
        self.num_graphs = 0
        cell = torch.zeros(1, device=device)
        keeper = torch.cuda.CUDAGraph()
        lease.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(lease.stream), shared.capture_under_way(lease.stream):
            keeper.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            cell.add_(1)
            keeper.capture_end()
        lease.stream.synchronize()
        # At exit, finalizers run in reverse order of creation: graphs before their pool.
        weakref.finalize(self, _retire_pool, shared, [self.memory, keeper])

    def segments(self) -> list[tuple[int, int]]:
        """Address and size of each of the pool's device memory segments."""
        # Not MemPool.snapshot(): with torch 2.11 and Python 3.12, processes that called it a few
        # thousand times crashed in unrelated Python code. Listing all pools does not.
        snapshot: list[dict[str, Any]] = compat.memory_snapshot()["segments"]
        return [
            (segment["address"], segment["total_size"])
            for segment in snapshot
            if tuple(segment["segment_pool_id"]) == tuple(self.memory.id)
        ]


def _retire_pool(shared: CaptureDevice, parts: list[object]) -> None:
    """Destroy a memory pool in the order that torch needs: first the graph, then the memory."""

    def take_apart() -> None:
        while parts:
            parts.pop()

    shared.dispose(take_apart)
