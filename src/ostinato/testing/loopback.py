"""All ranks in one process: one thread each, real data, no communication library.

For tests, and for measuring one rank's compute on one device. The ranks take turns: one runs at a
time, in rank order, up to its next collective. So runs are repeatable, ranks cannot race for the
process's global state, and a collective that can never complete is detected at once instead of
hanging. It says nothing about communication time.

On CUDA the threads start on the device and stream of ``run``'s caller, and a collective orders the
streams of ranks that switched to their own; the host waits for nothing. Collectives are eager
breaks: on the CPU a piecewise graph runs them between its segments, and a full graph cannot contain
them. On CUDA no graph can: a process captures one forward at a time, from end to end.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ostinato.errors import CaptureError, CollectiveError, ConfigError
from ostinato.graphs.backends.ambient import in_capture
from ostinato.graphs.capture.segments import eager_break, is_recording
from ostinato.parallel.comm import equal_parts

T = TypeVar("T")
Combine = Callable[[list[Tensor]], list[Tensor]]  # the members' inputs -> the members' results


class LoopbackWorld:
    """``world_size`` logical ranks. Create the comms, then ``run`` a function on all ranks.

    Comms may be kept and used in several runs. Ranks must wait for each other only through comms: a
    rank that blocks on another in any other way stops the world.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._run: _Run[object] | None = None

    def comm(self, ranks: Sequence[int], rank: int) -> LoopbackComm:
        """The group of ``ranks``, in this order, as seen by ``rank``."""
        group = tuple(ranks)
        if len(set(group)) != len(group) or not set(group) <= set(range(self.world_size)):
            raise ConfigError(
                f"the group {group} must list different ranks from 0 to {self.world_size - 1}"
            )
        if rank not in group:
            raise ConfigError(f"rank {rank} is not in the group {group}")
        return LoopbackComm(self, group, rank)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call ``function(rank)`` on every rank; return the results in rank order.

        The first error of any rank is raised here; the other ranks are released from their
        collectives and end. Grad mode, inference mode, context variables, CUDA device and stream
        are the caller's.
        """
        if self._run is not None:
            raise CollectiveError("this world is already running; start one run at a time")
        run = _Run(self.world_size, function)
        self._run = run  # type: ignore[assignment]  # comms do not depend on the result type
        try:
            return run.finish()
        finally:
            self._run = None

    def _meet(
        self, group: tuple[int, ...], rank: int, operation: str, tensor: Tensor, combine: Combine
    ) -> Tensor:
        run = self._run
        if run is None or threading.current_thread() is not run.threads[rank]:
            raise CollectiveError(
                f"rank {rank} called {operation} outside its own thread; call collectives from the "
                "function given to LoopbackWorld.run, with the comms of the rank it is called for"
            )
        return run.meet(group, rank, operation, tensor, combine)


@dataclass(frozen=True)
class LoopbackComm:
    """A ``Comm`` between the threads of one world. Created by ``LoopbackWorld.comm``."""

    world: LoopbackWorld
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        _exchange(self, "all_reduce", tensor, _reduce)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        def gather(tensors: list[Tensor]) -> list[Tensor]:
            return [torch.cat(tensors, dim) for _ in tensors]

        return _exchange(self, f"all_gather(dim={dim})", tensor, gather)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        def trade(tensors: list[Tensor]) -> list[Tensor]:
            sent = [equal_parts(each, self.size, split_dim) for each in tensors]
            return [torch.cat(parts, concat_dim) for parts in zip(*sent, strict=True)]

        equal_parts(tensor, self.size, split_dim)  # raises on the rank that passed a bad shape
        return _exchange(self, f"all_to_all({split_dim}, {concat_dim})", tensor, trade)


def _reduce(tensors: list[Tensor]) -> list[Tensor]:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    for tensor in tensors:
        tensor.copy_(total)
    return tensors


@eager_break
def _exchange(comm: LoopbackComm, operation: str, tensor: Tensor, combine: Combine) -> Tensor:
    if is_recording() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise CaptureError(
            f"{operation} of a LoopbackWorld cannot be part of a graph, because the ranks meet in "
            "Python; run eagerly or with piecewise graphs"
        )
    return comm.world._meet(comm.ranks, comm.rank, operation, tensor, combine)


class _Released(BaseException):
    """Ends a rank that waits for a failed one. Not an Exception, so that user code lets it pass."""


@dataclass
class _Meeting:
    """One collective of one group: the members' inputs and their results."""

    brought: dict[int, tuple[str, Tensor, torch.cuda.Stream | None]] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    stream: torch.cuda.Stream | None = None


class _Run(Generic[T]):
    """One run of a world. Only the rank whose turn it is accesses this, so it needs no lock."""

    def __init__(self, world_size: int, function: Callable[[int], T]) -> None:
        self._function = function
        self._ready = deque(range(world_size))
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._waiting: dict[int, str] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._results: dict[int, T] = {}
        self._error: BaseException | None = None
        state = _ThreadState()
        self.threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._live, rank, state),
                name=f"loopback rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]

    def finish(self) -> list[T]:
        for thread in self.threads:
            thread.start()
        self._pass_turn()
        try:
            for thread in self.threads:
                thread.join()
        except BaseException as interrupt:  # Ctrl-C: the ranks end at their next collective
            self._error = interrupt
            raise
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in range(len(self.threads))]

    def _live(self, rank: int, state: _ThreadState) -> None:
        self._turns[rank].acquire()
        try:
            if self._error is None:
                with state.restored():
                    self._results[rank] = self._function(rank)
        except _Released:
            pass
        except BaseException as error:
            if self._error is None:
                error.add_note(f"raised on rank {rank} of a LoopbackWorld")
                self._error = error
        self._pass_turn()

    def _pass_turn(self) -> None:
        if not self._ready and self._waiting and self._error is None:
            waits = "; ".join(f"rank {rank} in {what}" for rank, what in self._waiting.items())
            self._error = CollectiveError(f"these ranks wait for ranks that never join: {waits}")
        if self._error is not None:
            self._ready.extend(self._waiting)
            self._waiting.clear()
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def meet(
        self, group: tuple[int, ...], rank: int, operation: str, tensor: Tensor, combine: Combine
    ) -> Tensor:
        if self._error is not None:
            raise _Released
        if tensor.is_cuda and in_capture():
            raise CaptureError(
                f"rank {rank} would wait in {operation} for ranks that wait to capture: a process "
                "captures one forward on a GPU at a time; use graph mode NONE with LoopbackWorld, "
                "or one process per rank"
            )
        meeting = self._meetings.setdefault(group, _Meeting())
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        shape = f"{operation} of a {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        meeting.brought[rank] = (shape, tensor, stream)
        if len(meeting.brought) < len(group):
            self._waiting[rank] = f"{shape} with ranks {group}"
            self._pass_turn()
            self._turns[rank].acquire()
            if self._error is not None:
                raise _Released
        else:
            # The last rank to arrive computes all results, before any member can continue and
            # change its input.
            del self._meetings[group]
            _conclude(meeting, group, stream, combine)
            for member in group:
                if member != rank:
                    del self._waiting[member]
                    self._ready.append(member)
        if stream is not None and meeting.stream is not None and stream != meeting.stream:
            stream.wait_stream(meeting.stream)
        return meeting.results[rank]


def _conclude(
    meeting: _Meeting,
    group: tuple[int, ...],
    stream: torch.cuda.Stream | None,
    combine: Combine,
) -> None:
    operations = {rank: meeting.brought[rank][0] for rank in group}
    if len(set(operations.values())) > 1:
        calls = "; ".join(f"rank {rank}: {operation}" for rank, operation in operations.items())
        raise CollectiveError(f"the ranks {group} called different collectives: {calls}")
    tensors = [meeting.brought[rank][1] for rank in group]
    streams = [meeting.brought[rank][2] for rank in group]
    for tensor, other in zip(tensors, streams, strict=True):
        if stream is not None and other is not None and other != stream:
            stream.wait_stream(other)
            tensor.record_stream(stream)
    results = combine(tensors)
    for result, other in zip(results, streams, strict=True):
        if other is not None and other != stream:
            result.record_stream(other)
    meeting.results = dict(zip(group, results, strict=True))
    meeting.stream = stream


class _ThreadState:
    """Thread-local torch state of the creating thread, to apply in other threads."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # and its device
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield
