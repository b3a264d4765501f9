"""The graph pool: owns the memory that graphs share, and says when capturing is allowed.

Policy lives here, mechanism in the backend: captures are legal only during start-up
(``with pool.capturing()``) or when lazy capture is switched on, one thread at a time, with garbage
collection out of the way.
"""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ostinato.errors import CaptureError, ClosedError, ConcurrentUseError, ConfigError
from ostinato.graphs.backends import create_backend
from ostinato.graphs.capture.closing import Owner, close_each
from ostinato.graphs.capture.context import ForwardContext, current_forward_context
from ostinato.graphs.capture.segments import Recording, Tape, open_recording
from ostinato.graphs.capture.tree import map_tensors
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode

T = TypeVar("T")
_SPARE_BYTES = 1 << 22  # a few of the pieces that Python takes from the system

_get_ident = threading.get_ident


class ExclusiveUse:
    """What one thread at a time may do: a second one gets an error instead of a race.

    The thread that is in it may enter again. A signal handler that raises, at any moment, leaves it
    free: nothing comes between `with lock` and its block, as it may between a call of ``acquire``
    or of a context manager in Python and what follows. Two threads that enter at the very same time
    are let in one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None  # that is in it

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
    """Weights that travel: its copies must not cross the border of a capture."""

    def sync_prev_onload(self) -> None:
        """Wait for copies started before; called before every capture and every replay."""

    def join_after_forward(self) -> None:
        """Join copies started by the forward; called inside the capture, after the forward."""


class GraphOwner(Protocol):
    """Whoever keeps graphs of a pool, so that a failed or closed pool can drop them."""

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these numbers."""

    def clear_graphs(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Captured(Generic[T]):
    """A capture that succeeded. ``output`` is the captured run's, strong and with real values."""

    tape: Tape
    output: T


class GraphPool(Owner):
    """Memory and capture stream of a set of graphs that are never replayed concurrently.

    All graphs of a pool reuse each other's memory, so the output of one is valid until the next
    replay or capture in the same pool. Close the pool, or leave its ``with`` block, to give the
    memory back; tensors that alias it must not be used afterwards.

    ``lazy_capture``: graphs may be captured at any time, not at start-up alone. ``generators``:
    random generators of the ``device`` that graphs draw from, other than its default one.
    ``offloader``: is told of captures and replays (``WeightOffloader``).

    A pool may be used on one CUDA stream after the other (``follow_stream``), and two pools at the
    same time on two: they share no memory, workspaces of libraries included.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        lazy_capture: bool = False,
        generators: Sequence[torch.Generator] = (),
        offloader: WeightOffloader | None = None,
    ) -> None:
        self.backend = create_backend(torch.device(device), generators=generators)
        self.device = self.backend.device
        # What captured work may draw from; on CUDA, the code around it from the CPU's own as well.
        both = (torch.default_generator, *self.backend.generators)
        self.generators = tuple(dict.fromkeys(both))
        self.lazy_capture = lazy_capture
        self.offloader = offloader
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.exclusive_use = ExclusiveUse()  # one thread at a time
        self._follow_stream = self.backend.follow_stream
        self._spare = mmap.mmap(-1, _SPARE_BYTES)  # addresses; no page of it is ever touched
        self._sessions = 0
        self._closed = False
        self.serial = 0  # of the last capture that succeeded
        self.num_graphs_captured = 0  # by all of them; one with breaks is several graphs
        # In an eager break, of a recording or of a replay: the captures that may be replayed there.
        self._inside: range | None = None
        self._replaying_breaks = False
        # Forward contexts by identity: the last one captured under, with the serial before it, and
        # the last one replayed under.
        self._capture_context: ForwardContext | None = None
        self._serial_before_context = 0
        self._replay_context: ForwardContext | None = None

    # --- when capturing is allowed -------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Start-up: captures are legal inside, garbage is collected once and then left alone.

        Only young garbage: what was there when the program began is most of what there is, and
        going through it takes longer than many a capture.
        """
        self._check_open()
        self.follow_stream()
        self._sessions += 1
        try:
            with _garbage_collection_paused(generation=1):
                yield
        finally:
            self._sessions -= 1

    @property
    def capture_allowed(self) -> bool:
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
        """Take memory for captures to come, in one piece.

        Graphs share what is there: a piece as large as the largest tensor of any of them serves the
        smaller ones of all others too, where pieces taken as they are needed would add up.
        """
        self._check_open()
        if type(num_bytes) is not int or num_bytes < 0:
            raise ConfigError(f"bytes to reserve must be an int, not negative, got {num_bytes!r}")
        if num_bytes:
            self.backend.reserve(num_bytes)

    # --- capture and replay --------------------------------------------------------------------

    def follow_stream(self) -> bool:
        """Put what the current stream does next behind all that the pool was last used for.

        If that was on another stream, the current one waits for it (on the device; the host does
        not), and True is returned. Captures and replays do it themselves. Call it before writing to
        buffers that graphs of the pool read: replays that were enqueued on the other stream may
        still be reading them. A stream that is not torch's must live until the pool has moved on.
        """
        return self._follow_stream()

    def capture(
        self, run: Callable[[], T], *, split_at_breaks: bool = False, collect_garbage: bool = True
    ) -> Captured[T]:
        """Record one call of ``run``. The call takes effect exactly once, as if made eagerly."""
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

    def _capture(
        self, run: Callable[[], T], split_at_breaks: bool, collect_garbage: bool
    ) -> Captured[T]:
        self._check_memory_order()
        before = self.serial
        if self.offloader is not None:
            self.offloader.sync_prev_onload()
        collect = collect_garbage and self._sessions == 0
        generation = 2 if collect else None
        with (
            _garbage_collection_paused(generation=generation),
            self.backend.capture_scope(),
        ):
            recording = Recording(self.backend, split_at_breaks=split_at_breaks)
            outer, self._inside = self._inside, range(before + 1, sys.maxsize)
            try:
                with recording.open():
                    output = run()
                    if self.offloader is not None:
                        self.offloader.join_after_forward()
            except BaseException:
                # A forward is captured as a whole or not at all: see _check_memory_order.
                self.discard(range(self._serial_before_context + 1, self.serial + 1))
                raise
            finally:
                self._inside = outer
        tape = recording.finish()
        tape.inner = range(before + 1, self.serial + 1)
        self.serial += 1
        tape.serial = self.serial
        self.num_graphs_captured += len(tape.graphs)
        return Captured(tape=tape, output=output)

    def _check_memory_order(self) -> None:
        """Refuse a capture that would place its tensors on memory that is in use.

        What a replay returns reserves no memory. A capture that follows in the same forward, or
        that runs in the middle of a replay, would take that memory for its own.
        """
        context = current_forward_context()
        if context is not None and context.cudagraph_runtime_mode is CUDAGraphMode.NONE:
            context = None  # no wrapper acts on it, so it does not mark out one forward
        if self._replaying_breaks:
            raise CaptureError(
                "a graph was captured in an eager break while the graph around it was replayed; "
                "capture it beforehand in a pool of its own"
            )
        if context is not None and context is self._replay_context:
            raise CaptureError(
                f"{context.batch_descriptor} is captured for one part of the forward and not for "
                "another that comes later; the parts of a forward share memory and must be "
                "captured together: clear_all_graphs() of the pool, and run it again"
            )
        if context is None or context is not self._capture_context:
            self._capture_context = context
            self._serial_before_context = self.serial

    def replay(self, tape: Tape) -> None:
        """Run captured work on the current stream. Does not synchronise."""
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
                "which may use the same memory; give the inner one a pool of its own"
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
        """Have ``owner`` told when graphs must go. Held weakly."""
        self._owners.add(owner)

    def discard(self, serials: range) -> None:
        """Drop the captures with these numbers. Their memory stays in the pool for others."""
        for owner in list(self._owners):
            owner.discard(serials)

    def clear_all_graphs(self) -> None:
        """Drop all graphs of all wrappers, managers and graphed callables in the pool.

        They capture again when next they may.
        """
        self._check_open()
        self.exclusive_use.run(self._clear_all)

    def _clear_all(self) -> None:
        close_each(owner.clear_graphs for owner in list(self._owners))

    def release_unused(self) -> None:
        """Give back memory that no graph needs, as far as the device allows.

        On CUDA that is what torch has cached for the whole process, and it waits for the device.
        """
        self.backend.release_unused()

    @property
    def num_bytes(self) -> int:
        return self.backend.pool_bytes()

    @property
    def closed(self) -> bool:
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
        """Give back what the pool keeps for its end: closing takes some memory where none is left.

        For owners of a pool, as the first thing that they do when they close.
        """
        self._spare.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the graph pool is closed; build a new one to capture again")


class _PausedCollection:
    """Python's garbage collector, which all threads share, kept off while any of them captures."""

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
def _garbage_collection_paused(*, generation: int | None) -> Iterator[None]:
    """Keep the collector from freeing device objects in the middle of a capture.

    Before that, what is garbage up to ``generation`` is collected.
    """
    if generation is not None:
        gc.collect(generation)
    _paused_collection.enter()
    try:
        yield
    finally:
        _paused_collection.leave()
