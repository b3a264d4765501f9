"""The CUDA backend: ``torch.cuda.CUDAGraph``, driven directly on a stream of our own."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch

from ostinato.errors import (
    CaptureError,
    CaptureOutOfMemoryError,
    ConfigError,
)
from ostinato.graphs.backends.alias import alias_of
from ostinato.graphs.backends.ambient import capture_ambient
from ostinato.graphs.backends.base import replay_closed
from ostinato.graphs.backends.guard import (
    CaptureGuard,
    compiler_error,
    keep_dynamo_out,
    source_of_error,
)

try:
    # Comes with CUDA builds of torch; counts the nodes of a graph.
    from cuda.bindings import runtime as cuda_runtime
except ImportError:
    cuda_runtime = None


# torch's allocator of pinned memory still counts a broken capture as under way, and may ask its
# graph about it. These few graphs therefore live as long as the process.
_broken_captures: list[torch.cuda.CUDAGraph] = []


class _CaptureStream:
    """The stream that all captures on one device run on, one at a time.

    It is shared by all pools, because torch gives every stream that runs a matrix product a cuBLAS
    workspace (32 MiB on Hopper) and never takes it back. Graphs hold the address of that workspace
    for good, so it lives in memory of its own, which nothing else is ever placed in, even if
    somebody has torch drop its workspaces.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.lock = threading.RLock()
        self.capturing = False
        self._workspaces = torch.cuda.MemPool()
        self._retired: list[object] = []

    def prepare_blas(self) -> None:
        """Have handle and workspace ready: cuBLAS cannot be initialised inside a capture."""
        with torch.cuda.use_mem_pool(self._workspaces):
            torch.cuda.current_blas_handle()

    def dispose(self, thing: object) -> None:
        """Let go of a graph or a memory pool, but not during a capture.

        A pool that dies during one ends the process (an assertion in torch), and Python may drop
        the last reference at any time; what it drops during a capture waits here.
        """
        self._retired.append(thing)
        if not self.capturing and self.lock.acquire(blocking=False):
            try:
                while self._retired:
                    self._retired.pop()
            finally:
                self.lock.release()


@cache
def _capture_stream(device: torch.device) -> _CaptureStream:
    with torch.cuda.device(device):
        return _CaptureStream(device)


class _MemoryPool:
    """A torch memory pool that stays usable.

    torch drops its bookkeeping of a pool when the last graph in it dies, and then fails to capture
    into that pool again. One tiny graph that lives as long as the pool prevents that. Capturing it
    also takes the random generator out of the state that an invalidated capture leaves it in.
    """

    def __init__(self, device: torch.device, capture_stream: _CaptureStream) -> None:
        stream = capture_stream.stream
        self._capture_stream = capture_stream
        self.memory = torch.cuda.MemPool()
        # Typed by torch more narrowly than it is used.
        self.handle = cast(Any, self.memory.id)
        self.num_graphs = 0
        cell = torch.zeros(1, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._keeper = torch.cuda.CUDAGraph()
            self._keeper.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            cell.add_(1)
            self._keeper.capture_end()
        stream.synchronize()

    def __del__(self) -> None:
        self._capture_stream.dispose(_PoolRemains(self._keeper, self.memory))

    def dispose(self, graph: torch.cuda.CUDAGraph) -> None:
        self._capture_stream.dispose(graph)

    def segments(self) -> list[tuple[int, int]]:
        """Address and size of every piece of device memory the pool holds."""
        # Not MemPool.snapshot(): with torch 2.11 and Python 3.12, processes that called it a few
        # thousand times crashed in unrelated Python code. Listing all pools did not do that.
        snapshot: list[dict[str, Any]] = torch.cuda.memory._snapshot()["segments"]
        return [
            (segment["address"], segment["total_size"])
            for segment in snapshot
            if tuple(segment["segment_pool_id"]) == tuple(self.memory.id)
        ]


class _PoolRemains:
    """Takes a memory pool apart in the order that torch needs: first the graph, then the memory."""

    def __init__(self, keeper: torch.cuda.CUDAGraph, memory: torch.cuda.MemPool) -> None:
        self._parts = [memory, keeper]

    def __del__(self) -> None:
        while self._parts:
            self._parts.pop()


class CudaGraph:
    """One instantiated graph. Keeps its memory pool alive, since the pool must die after it."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: _MemoryPool, num_nodes: int | None
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool: _MemoryPool | None = pool
        self.num_nodes = num_nodes
        # Bound once: this is called for every step.
        self.replay = graph.replay
        pool.num_graphs += 1

    def close(self) -> None:
        graph, self._graph = self._graph, None
        pool, self._pool = self._pool, None
        if graph is not None and pool is not None:
            self.replay = replay_closed
            pool.num_graphs -= 1
            pool.dispose(graph)

    def __del__(self) -> None:
        self.close()


class CudaBackend:
    """Records on one CUDA device. See ``GraphBackend`` for the contract.

    Graphs are captured on a stream of our own and replayed on the caller's current one. The
    capture mode is thread-local: what other threads do to the device meanwhile is their business.
    """

    def __init__(self, device: torch.device, *, generators: Sequence[torch.Generator] = ()) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device} was asked for, but torch sees no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device cuda:{index} does not exist; torch sees {torch.cuda.device_count()}"
            )
        self.device = torch.device("cuda", index)
        self._generators = generators
        self._capture_stream = _capture_stream(self.device)
        self._stream = self._capture_stream.stream
        with self._capture_stream.lock, torch.cuda.device(self.device):
            self._pool = _MemoryPool(self.device, self._capture_stream)
        self._open: torch.cuda.CUDAGraph | None = None
        default = torch.cuda.default_generators[index]
        self._guard = CaptureGuard("cuda", (default, *generators))
        self._guarded = True
        self._modes = ExitStack()
        self._segments: list[tuple[int, int]] = []
        self._segments_seen_at = -1  # bytes that torch had reserved when they were listed
        # Addresses outside of the pool that the capture at hand has come across.
        self._foreign: set[int] | None = None

    @contextmanager
    def capture_scope(self) -> Iterator[None]:
        with (
            self._capture_stream.lock,
            torch.cuda.device(self.device),
            capture_ambient(),
        ):
            if torch.cuda.is_current_stream_capturing() and self._open is None:
                raise CaptureError(
                    "a capture was started while the current stream is being captured by somebody "
                    "else (torch.cuda.graph, make_graphed_callables, ...); capture before it"
                )
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            outer, self._foreign = self._foreign, set()
            try:
                with torch.cuda.stream(self._stream):
                    self._capture_stream.prepare_blas()
                    yield
            finally:
                self._foreign = outer
                caller.wait_stream(self._stream)

    @contextmanager
    def trusting(self) -> Iterator[None]:
        self._guarded = False
        try:
            yield
        finally:
            self._guarded = True

    def begin(self) -> None:
        keep_dynamo_out()
        # Only a kept graph can be looked into.
        graph = torch.cuda.CUDAGraph(keep_graph=cuda_runtime is not None)
        for generator in self._generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        self._open = graph
        self._capture_stream.capturing = True
        self._guard.last_operator = None
        if self._guarded:
            self._modes.enter_context(self._guard)

    def end(self) -> CudaGraph:
        graph, invalidated = self._stop_recording()
        if invalidated is not None:
            raise self._translate(invalidated, invalidated)
        num_nodes = None
        if cuda_runtime is not None:
            num_nodes = _count_nodes(graph)
            graph.instantiate()
        recorded = CudaGraph(graph, self._pool, num_nodes)
        recorded.replay()
        return recorded

    def abort(self, error: BaseException) -> BaseException:
        invalidated = None
        if self._open is not None:
            graph, invalidated = self._stop_recording()
            graph.reset()
        return self._translate(error, invalidated)

    def owns(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda or tensor.numel() == 0:
            return False
        address = tensor.data_ptr()
        if self._in_known_segment(address):
            return True
        if self._foreign is not None and address in self._foreign:
            return False
        self._list_segments()
        if self._in_known_segment(address):
            return True
        if self._foreign is not None:
            self._foreign.add(address)
        return False

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.owns(tensor):
            return tensor
        storage = tensor.untyped_storage()
        unowned = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        return alias_of(tensor, unowned, int(tensor.storage_offset()))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or tensor.numel() == 0:
            return tensor
        with torch.cuda.use_mem_pool(self._pool.memory):
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return copy.copy_(tensor)

    def reserve(self, num_bytes: int) -> None:
        # torch cuts later requests out of a free piece that is large enough, if it came to the pool
        # on the same stream, but it never joins pieces.
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool.memory):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pool_bytes(self) -> int:
        self._list_segments()
        return sum(size for _, size in self._segments)

    def release_unused(self) -> None:
        # torch frees the memory of a pool only with the pool, so an unused one is replaced.
        if self._pool.num_graphs == 0:
            self._replace_pool()
            gc.collect()
        # What warm-ups took on the capture stream, torch would keep for that stream alone.
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # Refused while another thread captures or allocates to a pool. It is not urgent.
            if "captures_underway" not in str(error):
                raise

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._replace_pool()

    def _in_known_segment(self, address: int) -> bool:
        """Memory that came to the pool stays in it, so what was seen once need not be listed."""
        return any(start <= address < start + size for start, size in self._segments)

    def _list_segments(self) -> None:
        """The pool's memory. Listing it is slow, so it is done when torch reserved some more."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved = int(stats["reserved_bytes"]["all"]["current"])
        if reserved != self._segments_seen_at:
            self._segments = self._pool.segments()
            self._segments_seen_at = reserved

    def _stop_recording(self) -> tuple[torch.cuda.CUDAGraph, RuntimeError | None]:
        """End the capture. The error is set when the capture had been invalidated."""
        assert self._open is not None
        graph, self._open = self._open, None
        self._modes.close()
        try:
            graph.capture_end()
        except RuntimeError as error:
            # torch stops half-way here: the allocator still routes memory to the pool and the
            # generator still believes in the capture. Both are put right, and the pool, which
            # torch would refuse to capture into again, is left to the graphs it already has.
            index, pool_id = self.device.index, self._pool.memory.id
            self._capture_stream.capturing = False
            torch._C._cuda_endAllocateToPool(index, pool_id)
            torch._C._cuda_releasePool(index, pool_id)
            _broken_captures.append(graph)
            self._replace_pool()
            return graph, error
        self._capture_stream.capturing = False
        return graph, None

    def _replace_pool(self) -> None:
        self._segments, self._segments_seen_at = [], -1
        with self._capture_stream.lock, torch.cuda.device(self.device):
            self._pool = _MemoryPool(self.device, self._capture_stream)

    def _translate(self, error: BaseException, invalidated: RuntimeError | None) -> BaseException:
        if isinstance(error, CaptureError) or not isinstance(error, Exception):
            return error
        source = source_of_error(error.__traceback__)
        first_line = str(error).split("\n", 1)[0]
        if isinstance(error, torch.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(self.device)
            return CaptureOutOfMemoryError(
                f"out of memory during a capture, at {source}: {first_line} The graph pool holds "
                f"{self.pool_bytes():,} bytes; {free:,} of {total:,} are free. Capture fewer or "
                "smaller sizes, or leave the graphs more memory",
                operator=self._guard.last_operator,
                source=source,
            )
        from_torch = isinstance(error, RuntimeError) and "captur" in first_line
        if invalidated is None and not from_torch:
            return compiler_error(error) or error
        return CaptureError(
            f"the capture was broken at {source or 'an unknown line'}, after operator "
            f"{self._guard.last_operator}: {first_line}. A graph cannot contain synchronisation "
            "with the host or with uncaptured streams; move that out of the graph, or mark the "
            "function with @eager_break and capture piecewise",
            operator=self._guard.last_operator,
            source=source,
        )


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    handle = cuda_runtime.cudaGraph_t(init_value=graph.raw_cuda_graph())
    status, _, count = cuda_runtime.cudaGraphGetNodes(handle)
    if int(status) != 0:
        raise CaptureError(f"cudaGraphGetNodes failed with {status} on a graph just captured")
    return int(count)
