"""The CUDA backend: drives ``torch.cuda.CUDAGraph`` directly, on a private stream."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from ostinato import compat
from ostinato.errors import CaptureError, CaptureOutOfMemoryError, ConfigError
from ostinato.graphs.backends.alias import alias_of
from ostinato.graphs.backends.ambient import capture_ambient
from ostinato.graphs.backends.base import OperatorObserver, replay_closed
from ostinato.graphs.backends.cuda.bindings import HAS_BINDINGS, count_nodes, node_counter
from ostinato.graphs.backends.cuda.device import DrawOrder, StreamLease, capture_device
from ostinato.graphs.backends.cuda.memory_map import torch_memory
from ostinato.graphs.backends.cuda.memory_pool import CudaMemoryPool
from ostinato.graphs.backends.cuda.nodes import CAN_READ_NODES, mapped_memory, read_nodes
from ostinato.graphs.backends.graph_node import GraphNode, MemoryRange, RangeKind
from ostinato.graphs.backends.guard import (
    CaptureGuard,
    compiler_error,
    keep_dynamo_out,
    source_of_error,
)
from ostinato.graphs.backends.operator_log import OperatorLog, logging_to

# After a broken capture, torch's pinned-memory allocator still counts it as in progress and may
# query its graph. These few graphs therefore live as long as the process.
_broken_captures: list[torch.cuda.CUDAGraph] = []

_Segments = weakref.WeakKeyDictionary[CudaMemoryPool, list[tuple[int, int]]]


class CudaGraph:
    """One instantiated graph. Keeps its memory pool alive, since the pool must outlive it."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: CudaMemoryPool,
        num_nodes: int | None,
        log: OperatorLog,
    ) -> None:
        self.num_nodes = num_nodes
        self.executable_bytes = 0
        self.log = log
        self._graph: torch.cuda.CUDAGraph | None = graph
        # Bound once, because every step calls it.
        self.replay: Callable[[], None] = graph.replay
        pool.num_graphs += 1
        self._retire = weakref.finalize(self, _retire_graph, pool, graph)

    def order_draws(self, draws: DrawOrder, graph: torch.cuda.CUDAGraph) -> None:
        """Order its replays with all other graphs that draw random numbers, from now on."""
        self.replay = partial(draws.replay, graph)

    def nodes(self) -> list[GraphNode] | None:
        if self._graph is None or not (HAS_BINDINGS and CAN_READ_NODES):
            return None  # without bindings the graph is not kept
        return read_nodes(self._graph)

    def close(self) -> None:
        self.replay = replay_closed
        self.executable_bytes = 0
        self._graph = None
        self._retire()


def _retire_graph(pool: CudaMemoryPool, graph: torch.cuda.CUDAGraph) -> None:
    pool.num_graphs -= 1
    # Reset, not dropped: at exit, other objects may still refer to it after its pool is gone.
    pool.shared.dispose(graph.reset)


class CudaBackend:
    """Records on one CUDA device. See ``GraphBackend`` for the contract.

    Graphs are captured on the backend's private stream and replayed on the caller's current stream.
    The capture mode is thread-local: other threads may use CUDA during a capture.
    """

    def __init__(self, device: torch.device, *, generators: Sequence[torch.Generator] = ()) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device} was requested, but torch sees no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device cuda:{index} does not exist; torch sees {torch.cuda.device_count()}"
            )
        self.device = torch.device("cuda", index)
        self._index = index
        self._shared = capture_device(self.device)
        # The stream of the pool's last use; its buffers are allocated on the current one.
        self._last_stream = torch.cuda.current_stream(self.device)
        self._last_raw_stream: int = self._last_stream.cuda_stream
        self._lease: StreamLease | None = self._shared.lease_stream()
        self._stream = self._lease.stream
        # Segments of the pool, and of those that it replaced, until their last graphs are gone.
        self._segments: _Segments = weakref.WeakKeyDictionary()
        self._segments_seen_at = -1  # bytes reserved by torch when the segments were listed
        self._pool: CudaMemoryPool | None = self._new_pool()
        self._open: torch.cuda.CUDAGraph | None = None
        default = torch.cuda.default_generators[index]
        self.generators = (default, *generators)
        self._guard = CaptureGuard("cuda", self.generators)
        self._guarded = True
        self.observer: OperatorObserver | None = None
        self._log = OperatorLog("cuda", complete=False)
        self._modes = ExitStack()
        self._under_way = ExitStack()  # closed once torch has ended the capture
        # Addresses outside the pool that the current capture has encountered.
        self._foreign: set[int] | None = None

    @contextmanager
    def capture_scope(self) -> Iterator[None]:
        with (
            self._shared.lock,
            torch.cuda.device(self.device),
            capture_ambient(),
        ):
            if torch.cuda.is_current_stream_capturing() and self._open is None:
                raise CaptureError(
                    "a capture was started while other code is capturing the current stream "
                    "(torch.cuda.graph, make_graphed_callables, ...); capture before that"
                )
            self.follow_stream()
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            outer, self._foreign = self._foreign, set()
            try:
                with torch.cuda.stream(self._stream):
                    self._lease_in_use.prepare_blas()
                    yield
            finally:
                self._foreign = outer
                caller.wait_stream(self._stream)

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        self._guarded = False
        try:
            yield
        finally:
            self._guarded = True

    def begin(self) -> None:
        keep_dynamo_out()
        self._modes = ExitStack()
        # Nodes can only be counted in a kept graph.
        graph = torch.cuda.CUDAGraph(keep_graph=HAS_BINDINGS)
        for generator in self.generators[1:]:
            graph.register_generator_state(generator)
        with ExitStack() as stack:
            stack.enter_context(self._shared.capture_under_way(self._stream))
            graph.capture_begin(pool=self._pool_in_use.handle, capture_error_mode="thread_local")
            self._under_way = stack.pop_all()
        self._open = graph
        self._guard.forget_last_operator()
        self._log = self._guard.log = OperatorLog(
            "cuda",
            complete=self._guarded or self.observer is not None,
            in_pool=self._in_known_segment,
            count_nodes=node_counter(self._stream),
        )
        self._modes.enter_context(logging_to(self._log))
        self._guard.observer = self.observer
        if self.observer is not None:
            self.observer.new_segment()
        if self._guarded or self.observer is not None:
            self._modes.enter_context(self._guard)

    def end(self) -> CudaGraph:
        graph, invalidated = self._stop_recording()
        if invalidated is not None:
            raise self._translate(invalidated, invalidated)
        num_nodes, untracked = None, self.untracked_bytes()
        if HAS_BINDINGS:
            num_nodes = count_nodes(graph)
            graph.instantiate()
        if self._log.calls:
            self._list_segments()
        self._log.finish()
        recorded = CudaGraph(graph, self._pool_in_use, num_nodes, self._log)
        before = self._num_drawn()
        self._shared.draws.replay(graph)  # the first launch also moves the graph to the device
        recorded.executable_bytes = max(0, self.untracked_bytes() - untracked)
        if self._num_drawn() != before:
            recorded.order_draws(self._shared.draws, graph)
        return recorded

    def _num_drawn(self) -> list[int]:
        """The position of each generator's sequence. A replay that draws advances it."""
        return [int(generator.get_offset()) for generator in self.generators]

    def abort(self, error: BaseException) -> BaseException:
        invalidated = None
        if self._open is not None:
            graph, invalidated = self._stop_recording()
            graph.reset()
        self._under_way.close()
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
        unowned = compat.storage_from_address(storage.data_ptr(), tensor.device, storage.nbytes())
        return alias_of(tensor, unowned, int(tensor.storage_offset()))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or tensor.numel() == 0:
            return tensor
        with torch.cuda.use_mem_pool(self._pool_in_use.memory):
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return copy.copy_(tensor)

    def reserve(self, num_bytes: int) -> None:
        # torch splits a large enough free block for later requests on the same stream, but never
        # merges blocks.
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool_in_use.memory):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pool_bytes(self) -> int:
        self._list_segments()
        return sum(size for segments in self._segments.values() for _, size in segments)

    def workspace_bytes(self) -> int:
        ranges = self.memory_ranges()
        return sum(each.end - each.start for each in ranges if each.kind is RangeKind.WORKSPACE)

    def untracked_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free) - self._reserved_by_torch()

    def memory_ranges(self) -> list[MemoryRange]:
        pool = None if self._pool is None else self._pool.memory.id
        workspaces = () if self._lease is None else (self._lease.workspace_pool,)
        return torch_memory(pool, workspaces)

    def find_memory(self, address: int) -> MemoryRange | None:
        return mapped_memory(address)

    def release_unused(self) -> None:
        # torch frees a pool's memory only with the pool, so an unused pool is replaced.
        if self._pool is not None and self._pool.num_graphs == 0:
            self._replace_pool()
            gc.collect()
        # torch would keep the warm-ups' memory for the capture stream alone.
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # Refused while another thread captures or allocates to a pool; it can wait.
            if "captures_underway" not in str(error):
                raise

    def follow_stream(self) -> bool:
        # Reading the stream's id is fast; creating a Stream object is slower than all the rest.
        raw = compat.raw_stream(self._index)
        if raw == self._last_raw_stream:
            return False
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "graphs or buffers of a pool were used while other code is capturing the "
                    "current stream (torch.cuda.graph, make_graphed_callables, ...), so they "
                    "cannot be ordered after their last use; use them outside that capture"
                )
        stream.wait_stream(self._last_stream)
        self._last_stream, self._last_raw_stream = stream, raw
        return True

    def close(self) -> None:
        try:
            self._shared.synchronize()
        finally:
            # Live graphs keep the pool and the lease until they are destroyed.
            self._pool = self._lease = None
            self._segments, self._segments_seen_at = weakref.WeakKeyDictionary(), -1

    def _in_known_segment(self, address: int) -> bool:
        """Whether the address is in a listed segment. Memory never leaves a pool."""
        return any(
            start <= address < start + size
            for segments in self._segments.values()
            for start, size in segments
        )

    def _list_segments(self) -> None:
        """List the pools' segments. This is slow, so it runs only after torch reserved more."""
        reserved = self._reserved_by_torch()
        if self._pool is not None and reserved != self._segments_seen_at:
            for pool in list(self._segments):
                self._segments[pool] = pool.segments()
            self._segments_seen_at = reserved

    def _reserved_by_torch(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["reserved_bytes"]["all"]["current"])

    def _stop_recording(self) -> tuple[torch.cuda.CUDAGraph, RuntimeError | None]:
        """End the capture. The error is set if the capture was invalidated."""
        assert self._open is not None
        self._modes.close()  # before `_open` is cleared: if interrupted, `abort` stops again
        graph, self._open = self._open, None
        try:
            try:
                graph.capture_end()
            finally:
                self._under_way.close()
        except RuntimeError as error:
            # torch stops half-way here: the allocator still routes memory to the pool, and the
            # generator still considers itself captured. Both are reset. torch would refuse to
            # capture into this pool again, so it is left to its existing graphs.
            index, pool_id = self.device.index, self._pool_in_use.memory.id
            compat.end_allocate_to_pool(index, pool_id)
            compat.release_pool(index, pool_id)
            _broken_captures.append(graph)
            self._replace_pool()
            return graph, error
        return graph, None

    def _replace_pool(self) -> None:
        self._segments_seen_at = -1
        self._pool = self._new_pool()

    def _new_pool(self) -> CudaMemoryPool:
        with self._shared.lock, torch.cuda.device(self.device):
            pool = CudaMemoryPool(self.device, self._shared, self._lease_in_use)
        self._segments[pool] = []
        return pool

    @property
    def _pool_in_use(self) -> CudaMemoryPool:
        assert self._pool is not None, "the graph pool checks that it is open"
        return self._pool

    @property
    def _lease_in_use(self) -> StreamLease:
        assert self._lease is not None, "the graph pool checks that it is open"
        return self._lease

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
