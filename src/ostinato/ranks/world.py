"""A rank's membership in the world that runs one model: groups, channel, watchdog, faults.

All ranks create a ``World`` together. It knows nothing about models. A failure on another rank
surfaces here as an error that names it: at once if a connection breaks, and after the timeout if a
rank is silent or keeps the others waiting. A main thread that is stuck in a collective by then is
freed if possible (we own the other processes and can end them, or NCCL aborts); otherwise the
process ends, with the reason on stderr.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ostinato.errors import CaptureError, OstinatoError, RankFailedError
from ostinato.parallel.comm import Comm, NoComm
from ostinato.parallel.distributed import DistributedComm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import RankContext
from ostinato.ranks.channel import Broadcaster, Channel
from ostinato.ranks.watch.beats import Store
from ostinato.ranks.watch.progress import Progress
from ostinato.ranks.watch.watchdog import Watchdog, end_process

_FOREVER_S = 10 * 365 * 24 * 3600.0
_GOODBYE_S = 5.0  # how long a leaving rank waits for the others to leave too
_ACROSS: tuple[int, ...] = ()  # stands for the group across replicas among those of one
_COMMUNICATION = ("gloo", "nccl", "connection", "socket", "broken pipe")


class World:
    """Created by all ranks at the same time, with ``torch.distributed`` initialised on all of them.

    "The same time" means within ``timeout_s``: let the ranks wait for each other first. If creation
    fails, everything is closed, including ``on_close``.

    Args:
        layout: The number of ranks of a replica, and how the model is split over them.
        device: This rank's device.
        store: A separate client for the watchdog. It needs keys that are the same on all ranks and
            used by no other code, before or after.
        num_replicas: The number of replicas. Ranks of one replica are consecutive.
        lockstep: Connect the ranks that have the same part of different replicas.
        spreads_experts: Each rank has some of the experts, of all ranks.
        threshold: The largest batch of the shift model; 0 for none.
        timeout_s: How long a rank may show no sign of life, or keep others waiting in a step,
            before it counts as failed.
        symmetric: All ranks run the same script; otherwise only rank 0 does, and the others serve.
        steps: The broadcaster for rank 0's step plans; the group of all ranks if None.
        dead_rank: Returns a rank whose process has ended, and how, if that is visible.
        end_others: Ends the other ranks' processes at once, if they are ours.
        on_close: Called last, when the groups are gone.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        device: torch.device,
        store: Store,
        *,
        num_replicas: int = 1,
        lockstep: bool = False,
        spreads_experts: bool = False,
        threshold: int = 0,
        timeout_s: float = 30.0,
        symmetric: bool = True,
        steps: Broadcaster | None = None,
        dead_rank: Callable[[], RankFailedError | None] = lambda: None,
        end_others: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.num_replicas = num_replicas
        self.rank = dist.get_rank()
        self.replica, self.rank_in_replica = divmod(self.rank, layout.world_size)
        self.device = device
        self.symmetric = symmetric
        self._timeout_s = timeout_s
        self._dead_rank = dead_rank
        self._end_others = end_others
        self._on_close = on_close
        self._failure: RankFailedError | None = None
        self._working = False  # whether the main thread may be waiting for another rank
        self._closed = False
        self._process = os.getpid()
        self._control: DistributedComm | None = None
        self._comms: dict[tuple[int, ...], DistributedComm] = {}
        self.replica_agreement: DistributedComm | None = None
        replicas: Comm = NoComm()
        self._aborts: dict[tuple[int, ...], threading.Thread] = {}
        self.progress = Progress(self._num_calls)  # of the main thread
        self._watchdog = Watchdog(
            timeout_s,
            self.rank,
            store,
            world_size=layout.world_size * num_replicas,
            store_rank=0,
            progress=self.progress,
            on_failure=self._rescue,
        )
        try:
            with self.together():
                everyone = self._make_groups(lockstep)
                if spreads_experts and num_replicas > 1:
                    replicas = self._connect_replicas()
        except BaseException:
            self.close()
            raise
        self.channel = Channel(everyone if steps is None else steps, self.progress)
        self.rank_context = RankContext(
            layout=layout,
            rank=self.rank_in_replica,
            device=device,
            comm_of=self._comm_of,
            everyone=everyone,
            threshold=threshold,
            is_whole=layout.world_size == 1 and not spreads_experts,
            spreads_experts=spreads_experts,
            replicas=replicas,
            communicator_bytes=sum(comm.num_bytes for comm in self._comms.values()),
        )

    def _make_groups(self, lockstep: bool) -> DistributedComm:
        """Connect this rank to the others; return the group of all ranks."""
        layout, own = self.layout, self.rank_in_replica
        ranks = range(layout.world_size * self.num_replicas)
        everyone = self._control = DistributedComm(ranks, "cpu", timeout_s=_FOREVER_S)
        for group in (
            layout.tensor_group(own),
            layout.sequence_group(own),
            layout.shift_group,  # with TP and SP, late SwiftKV layers always need it
            layout.context_group(own),
        ):
            if len(group) > 1 and group not in self._comms:
                self._comms[group] = DistributedComm(self._in_world(group), self.device)
        if lockstep:
            self.replica_agreement = DistributedComm(self._peers, "cpu", timeout_s=_FOREVER_S)
        return everyone

    def _connect_replicas(self) -> DistributedComm:
        """The ranks with the same part of all replicas, for tensors on the device."""
        comm = DistributedComm(self._peers, self.device)
        self._comms[_ACROSS] = comm
        return comm

    @property
    def _peers(self) -> range:
        ranks = range(self.layout.world_size * self.num_replicas)
        return ranks[self.rank_in_replica :: self.layout.world_size]

    def _in_world(self, group: Sequence[int]) -> list[int]:
        """The ranks of the world that have these ranks in this replica."""
        first = self.replica * self.layout.world_size
        return [first + rank for rank in group]

    @property
    def control(self) -> DistributedComm:
        """The group of all ranks, for CPU tensors."""
        assert self._control is not None, "made at the start"
        return self._control

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _num_calls(self) -> int:
        """A count that is equal on all ranks of a replica that are equally far."""
        agreement = self.replica_agreement
        agreed = 0 if agreement is None else agreement.num_calls
        return agreed + sum(comm.num_calls for comm in tuple(self._comms.values()))

    def _comm_of(self, ranks: Sequence[int]) -> Comm:
        group = tuple(ranks)
        return NoComm() if len(group) == 1 else self._comms[group]

    # --- faults ----------------------------------------------------------------------------------

    def check(self, *, processes: bool = True) -> None:
        """Raise if a rank is known to have failed. No communication.

        ``processes``: also check each rank's process, with one system call each.
        """
        if self._failure is None and processes and os.getpid() != self._process:
            self._failure = RankFailedError(
                f"this is a fork of rank {self.rank}, which cannot use its connections to the "
                "other ranks; use the LLM in the process that created it"
            )
        if self._failure is None:
            self._watchdog.check()
            self._failure = self._dead_rank() if processes else None
            if self._failure is None:
                return
            said = self._watchdog.reported(self._failure.rank)
            if said is not None:
                self._failure = said
        raise RankFailedError(str(self._failure), self._failure.rank)

    @contextlib.contextmanager
    def together(self, *, processes: bool = True) -> Iterator[None]:
        """Work in which all ranks take part and wait for each other. An error fails the world.

        A broken collective becomes a ``RankFailedError`` that names the rank. Any other error is
        this rank's own: it is reported to the others and raised unchanged. Calls ``check`` first,
        with ``processes``.
        """
        self.check(processes=processes)
        self._working = True
        try:
            yield
        except BaseException as error:
            self._working = False
            self.progress.finish()  # before looking for the failed rank, which takes time
            failure = self._blamed(error)
            if failure is None:
                self._fail(error)
                raise
            self._failure = failure
            if failure is error:
                raise
            raise failure from error
        finally:
            self._working = False
            self.progress.finish()

    @contextlib.contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside ``together``: work of any length that waits for no other rank.

        If a rank fails in the meantime, this process is not ended; the error is raised at the end.
        """
        self._working = False
        yield
        # In this order: a rank that fails in between is either seen here or triggers a rescue.
        self._working = True
        self.check()

    def _blamed(self, error: BaseException) -> RankFailedError | None:
        """The failure of another rank that caused ``error``, if any."""
        if isinstance(error, RankFailedError):
            return error
        if _is_communication(error):
            # The connection broke before the failure was reported. The report follows in time.
            deadline = time.monotonic() + 1.2 * self._timeout_s + 1.0
            while time.monotonic() < deadline:
                try:
                    self.check()
                except RankFailedError as failure:
                    return failure
                time.sleep(0.02)
        return None

    def _fail(self, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}"
        self._failure = RankFailedError(f"rank {self.rank} failed earlier: {what}", self.rank)
        self.report(error)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. They know after a tenth of the timeout."""
        with contextlib.suppress(Exception):  # the store itself may have failed
            self._watchdog.report(f"{type(error).__name__}: {error}")

    def _rescue(self, failure: RankFailedError) -> None:
        """In a watchdog thread: free the main thread from a collective with a failed rank."""
        if not self.is_first and not self.symmetric:
            if not self._closed:
                end_process(failure)
            return
        self._failure = self._failure or failure  # this rank's own failure takes precedence
        self._end_others()  # breaks the connections that gloo is blocked on
        self._abort()
        deadline = time.monotonic() + max(1.0, self._timeout_s / 4)
        while self._working and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._working:
            end_process(failure)

    def _abort(self) -> None:
        """Start aborting every communicator that supports it, each in its own thread."""
        for group, comm in tuple(self._comms.items()):
            if comm.device.type == "cuda" and group not in self._aborts:  # gloo has no abort
                self._aborts[group] = threading.Thread(target=_abort, args=(comm,), daemon=True)
                self._aborts[group].start()

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave. All models and graphs must be closed. Closing twice is harmless."""
        if self._closed or os.getpid() != self._process:  # a fork must not end its parent's ranks
            return
        self._closed = True
        try:
            self._part()
        finally:
            self._on_close()

    def _part(self) -> None:
        """Close every connection to the other ranks, even if closing one raises."""
        if self._failure is None and self._control is not None:
            # Closing connections early would break a collective that a slower rank is still in.
            with contextlib.suppress(Exception):
                self._control.wait_for_all(_GOODBYE_S)
        with contextlib.suppress(Exception):
            self._watchdog.close()
        if self._failure is not None:
            self._abort()  # otherwise releasing NCCL's communicators would wait for the failed rank
            deadline = time.monotonic() + _GOODBYE_S
            for thread in self._aborts.values():
                thread.join(max(0.0, deadline - time.monotonic()))
        for comm in (*self._comms.values(), self.replica_agreement, self._control):
            if comm is not None:
                with contextlib.suppress(Exception):
                    comm.close()


def _abort(comm: DistributedComm) -> None:
    with contextlib.suppress(Exception):  # it may already be closed
        comm.abort()


def _is_communication(error: BaseException) -> bool:
    """Whether a connection between ranks broke, in a capture or outside."""
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, CaptureError) and error.__cause__ is not None:
        return _is_communication(error.__cause__)
    if isinstance(error, OstinatoError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(word in text for word in _COMMUNICATION)
