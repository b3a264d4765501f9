"""The graph pool: owns the memory that graphs share, and decides when captures are allowed.

The pool holds the policy, the backend the mechanism: captures are legal only during start-up
(``with pool.capturing()``) or with lazy capture on, one thread at a time, with garbage collection
off.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ostinato.errors import CaptureError, ClosedError, ConcurrentUseError, ConfigError
from ostinato.graphs.backends import create_backend
from ostinato.graphs.backends.base import OperatorObserver
from ostinato.graphs.capture.closing import Owner, close_each
from ostinato.graphs.capture.context import ForwardContext, current_forward_context
from ostinato.graphs.capture.garbage import garbage_collection_paused
from ostinato.graphs.capture.segments import Recording, Tape, open_recording
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.graphs.tree import map_tensors
from ostinato.quoting import shown

T = TypeVar("T")
_SPARE_BYTES = 1 << 22  # a few of the pieces that Python takes from the system


_get_ident = threading.get_ident


class ExclusiveUse:
    """Lets one thread in at a time: a second one gets an error instead of a race.

    The thread inside may enter again. A signal handler that raises at any moment leaves it free:
    Python runs none between `with lock` and its block, as it may after a call of ``acquire``.
    Threads that enter at exactly the same time enter one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None  # the thread inside

    def run(self, function: Callable[..., T], *args: Any) -> T:
        me = _get_ident()
        if self._thread is not None and self._thread != me:
            raise self.refusal()
        with self._lock:
            outer = self._thread
            self._thread = me
            try:
                return function(*args)
            finally:
                self._thread = outer

    def refusal(self) -> ConcurrentUseError:
        return ConcurrentUseError(
            f"thread {threading.current_thread().name!r} used graphs while another thread was "
            "capturing or replaying them; graphs of one pool share memory, so use one thread at a "
            "time or one pool per thread"
        )


class WeightOffloader(Protocol):
    """Moves weights to and from the device; its copies must not cross the start or end of a
    capture."""

    def sync_prev_onload(self) -> None:
        """Wait for copies started before; called before every capture and every replay."""

    def join_after_forward(self) -> None:
        """Wait for copies started by the forward; called inside the capture, after the forward."""


class GraphOwner(Protocol):
    """Keeps graphs of a pool, and drops them when a capture fails or the pool closes."""

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these serials."""

    def clear_graphs(self) -> None: ...

    def tapes(self) -> Iterable[tuple[str, Tape]]:
        """Its graphs, each with a name for people."""


@dataclass(frozen=True, kw_only=True)
class Captured(Generic[T]):
    """A successful capture. ``output`` holds strong references and real values."""

    tape: Tape
    output: T


def check_pool(pool: object) -> None:
    """Raise unless it is a ``GraphPool``."""
    if not isinstance(pool, GraphPool):
        raise ConfigError(f"pool must be an ostinato.GraphPool, got {shown(pool)}")


class GraphPool(Owner):
    """Memory and capture stream of a set of graphs that are never replayed concurrently.

    All graphs of a pool reuse each other's memory, so the output of one is valid until the next
    replay or capture in the same pool. Close the pool, or leave its ``with`` block, to free the
    memory; tensors that alias it must not be used afterwards.

    ``lazy_capture``: graphs may be captured at any time, not only at start-up. ``generators``:
    random generators of the ``device`` that graphs draw from, besides its default one.
    ``offloader``: called around captures and replays (``WeightOffloader``); None: there is none.

    A pool may be used on different CUDA streams in turn (``follow_stream``). Two pools may be used
    on two streams at the same time: they share no memory, not even library workspaces.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        lazy_capture: bool = False,
        generators: Sequence[torch.Generator] = (),
        offloader: WeightOffloader | None = None,
    ) -> None:
        self.backend = create_backend(device, generators=generators)
        self.device = self.backend.device
        # Generators for captured work; on CUDA, code around it may also draw from the CPU's.
        self.generators = tuple(dict.fromkeys((torch.default_generator, *self.backend.generators)))
        self.lazy_capture = lazy_capture
        # Makes what observes a capture; its tape keeps it. None: captures are not observed.
        self.new_observer: Callable[[], OperatorObserver] | None = None
        self.offloader = offloader
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.exclusive_use = ExclusiveUse()  # one thread at a time
        self._follow_stream = self.backend.follow_stream
        self._spare = mmap.mmap(-1, _SPARE_BYTES)  # addresses only; its pages are never touched
        self._sessions, self._closed = 0, False
        self.serial = 0  # of the last successful capture
        # In total; a capture with breaks has several graphs.
        self.num_graphs_captured = self.executable_bytes_captured = 0
        # In an eager break of a recording or a replay: the captures that may be replayed there.
        self._inside: range | None = None
        self._replaying_breaks = False
        # Contexts by identity: of the last capture, with the serial before it; of the last replay.
        self._capture_context: ForwardContext | None = None
        self._serial_before_context = 0
        self._replay_context: ForwardContext | None = None

    # --- when capturing is allowed -------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allow captures inside, for start-up; collect garbage once, then turn collection off.

        Only young generations are collected: most objects are as old as the program, and scanning
        them takes longer than many captures.
        """
        self._check_open()
        self.follow_stream()
        self._sessions += 1
        try:
            with garbage_collection_paused(generation=1):
                yield
        finally:
            self._sessions -= 1

    @property
    def capture_allowed(self) -> bool:
        """Whether a graph may be captured now: inside ``capturing()``, or with lazy capture."""
        return self._sessions > 0 or self.lazy_capture

    def validate_cudagraph_capturing_enabled(self, descriptor: BatchDescriptor) -> None:
        """Raise unless ``descriptor`` may be captured now."""
        if self.closed:
            raise ClosedError(f"cannot run {descriptor}: the graph pool is closed")
        if not self.capture_allowed:
            raise CaptureError(
                f"no graph was captured for {descriptor} and capturing is not enabled; add it to "
                "the plan, switch lazy capture on, or run this batch under mode NONE"
            )

    def reserve(self, num_bytes: int) -> None:
        """Reserve ``num_bytes`` of contiguous memory for later captures.

        Graphs share memory: one block as large as the largest tensor of any graph also serves the
        smaller tensors of all others, whereas blocks allocated on demand would add up.
        """
        self._check_open()
        if type(num_bytes) is not int or num_bytes < 0:
            raise ConfigError(f"num_bytes must be an int of at least 0, got {num_bytes!r}")
        if num_bytes:
            self.backend.reserve(num_bytes)

    # --- capture and replay --------------------------------------------------------------------

    def follow_stream(self) -> bool:
        """Order later work on the current stream after the last use of the pool.

        If that was on another stream, the current one waits for it (on the device, not the host),
        and True is returned. Captures and replays do this themselves. Call it before writing to
        buffers that graphs of the pool read: replays enqueued on the other stream may still be
        reading them. A stream not created by torch must live until the pool is used on another.
        """
        return self._follow_stream()

    def capture(
        self, run: Callable[[], T], *, split_at_breaks: bool = False, collect_garbage: bool = True
    ) -> Captured[T]:
        """Record one call of ``run``. The call takes effect exactly once, as if made eagerly.

        ``split_at_breaks``: at every ``@eager_break`` one graph ends and the next begins.
        ``collect_garbage``: before the capture, unless inside ``capturing()``.
        """
        self._check_open()
        if open_recording() is not None:
            raise CaptureError(
                "a capture was started inside another capture; capture the outer callable alone "
                "(its graph will contain the inner work), or the inner one before it"
            )
        if not self.capture_allowed:
            raise CaptureError(
                "capturing is not enabled; capture at start-up inside `with pool.capturing()`, or "
                "build the pool with lazy_capture=True"
            )
        return self.exclusive_use.run(self._capture, run, split_at_breaks, collect_garbage)

    @leaving_as_found
    def _capture(
        self, run: Callable[[], T], split_at_breaks: bool, collect_garbage: bool
    ) -> Captured[T]:
        self._check_memory_order()
        before = self.serial
        join = None
        if self.offloader is not None:
            self.offloader.sync_prev_onload()
            join = self.offloader.join_after_forward
        generation = 2 if collect_garbage and self._sessions == 0 else None
        with garbage_collection_paused(generation=generation), self.backend.capture_scope():
            recording = Recording(self.backend, split_at_breaks=split_at_breaks)
            outer, self._inside = self._inside, range(before + 1, sys.maxsize)
            observer = None if self.new_observer is None else self.new_observer()
            outer_observer, self.backend.observer = self.backend.observer, observer
            try:
                output = recording.record(run, join)
            except BaseException:
                # A forward is captured as a whole or not at all: see _check_memory_order.
                self.discard(range(self._serial_before_context + 1, self.serial + 1))
                raise
            finally:
                self._inside = outer
                self.backend.observer = outer_observer
        tape = recording.finish()
        tape.log = observer
        tape.inner = range(before + 1, self.serial + 1)
        self.serial += 1
        tape.serial = self.serial
        self.num_graphs_captured += len(tape.graphs)
        self.executable_bytes_captured += sum(each.executable_bytes for each in tape.graphs)
        return Captured(tape=tape, output=output)

    def _check_memory_order(self) -> None:
        """Raise if a capture would place its tensors on memory that is in use.

        The output of a replay reserves no memory. A capture later in the same forward, or in the
        middle of a replay, would reuse that memory.
        """
        context = current_forward_context()
        if context is not None and context.cudagraph_runtime_mode is CUDAGraphMode.NONE:
            context = None  # no wrapper acts on it, so it does not identify one forward
        if self._replaying_breaks:
            raise CaptureError(
                "a graph was captured in an eager break while the graph around it was replayed; "
                "capture it beforehand in a separate pool"
            )
        if context is not None and context is self._replay_context:
            raise CaptureError(
                f"{context.batch_descriptor} is captured for one part of the forward but not for a "
                "later one; the parts of a forward share memory and must be captured together: "
                "call clear_all_graphs() of the pool, and run the forward again"
            )
        if context is None or context is not self._capture_context:
            self._capture_context = context
            self._serial_before_context = self.serial

    def replay(self, tape: Tape) -> None:
        """Run the work that ``tape`` holds on the current stream. Does not synchronise."""
        self.exclusive_use.run(self._replay, tape)

    def _replay(self, tape: Tape) -> None:
        if open_recording() is not None:
            raise CaptureError(
                "a graph was replayed inside a capture; call the plain function there, and its "
                "work becomes part of the graph being captured"
            )
        if self._inside is not None and tape.serial not in self._inside:
            raise CaptureError(
                "a graph was replayed in an eager break of another graph of the same pool, "
                "which may use the same memory; give the inner one a separate pool"
            )
        self._follow_stream()
        self._replay_context = current_forward_context()
        if self.offloader is not None:
            self.offloader.sync_prev_onload()
        if tape.has_breaks:
            self._replay_with_breaks(tape)
        else:
            tape.replay()

    def _replay_with_breaks(self, tape: Tape) -> None:
        outer = self._inside, self._replaying_breaks
        self._inside, self._replaying_breaks = tape.inner, True
        try:
            with torch.no_grad():  # as at capture
                tape.replay()
        finally:
            self._inside, self._replaying_breaks = outer

    def weak(self, value: T) -> T:
        """``value`` with every tensor in pool memory replaced by an alias that reserves nothing."""
        return map_tensors(self.backend.weak, value)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy if it is in pool memory, where the next replay may write."""
        return tensor.clone() if self.backend.owns(tensor) else tensor

    # --- ownership -----------------------------------------------------------------------------

    def register(self, owner: GraphOwner) -> None:
        """Register ``owner``, by weak reference, to be told which graphs to drop."""
        self._owners.add(owner)

    @property
    def owners(self) -> list[GraphOwner]:
        """What keeps graphs of the pool: wrappers, managers, graphed callables."""
        return list(self._owners)

    def discard(self, serials: range) -> None:
        """Drop the captures with these serials. Their memory stays in the pool for others."""
        for owner in list(self._owners):
            owner.discard(serials)

    def clear_all_graphs(self) -> None:
        """Drop all graphs of all wrappers, managers and graphed callables in the pool.

        They capture again as soon as captures are allowed.
        """
        self._check_open()
        self.exclusive_use.run(self._clear_all)

    def _clear_all(self) -> None:
        close_each(owner.clear_graphs for owner in list(self._owners))

    def release_unused(self) -> None:
        """Free memory that no graph needs, as far as the device allows.

        On CUDA this empties torch's cache for the whole process, and waits for the device.
        """
        self.backend.release_unused()

    @property
    def num_bytes(self) -> int:
        """Memory of all graphs in the pool."""
        return self.backend.pool_bytes()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Drop all graphs and their memory. Closing twice is harmless."""
        if self._closed:
            return
        self.free_spare()
        self.exclusive_use.run(self._close)

    def _close(self) -> None:
        self._closed = True
        try:
            self._clear_all()
        finally:
            self.backend.close()

    def free_spare(self) -> None:
        """Free the memory reserved for closing, when none may be left. Its owners call it first."""
        self._spare.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the graph pool is closed; build a new one to capture again")
