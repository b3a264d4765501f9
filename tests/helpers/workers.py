"""The pool of worker processes behind the ``gloo_pool`` fixture, independent of what it runs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from forked_processes import ForkedProcess, ForkServer
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

WORKERS = 4
TIMEOUT_S = 180.0  # of a machine where much else runs
GRACE_S = 5.0  # for the other ranks, once one has failed: they may be stuck in a collective with it


class WorkerError(Exception):
    """A worker raised something that cannot be pickled; its traceback is the message."""


class WorkerDiedError(Exception):
    """A worker's process ended. ``results`` holds what the other ranks returned, by rank."""

    def __init__(self, message: str, rank: int, results: dict[int, Any]) -> None:
        super().__init__(message)
        self.rank = rank
        self.results = results


class WorkerTimeoutError(Exception):
    """Workers did not finish in time; they were killed."""


@dataclass
class _Worker:
    process: ForkedProcess
    connection: Connection


@dataclass
class _Round:
    """What came back from one call: each rank ends up in exactly one of the four."""

    waiting: set[int]
    results: dict[int, Any] = field(default_factory=dict)
    errors: list[tuple[float, int, BaseException]] = field(default_factory=list)
    dead: dict[int, int | None] = field(default_factory=dict)


class GlooPool:
    """Four processes, started once, that run functions as the ranks of a gloo process group.

    ``pool.run(function, *args, world_size=2)`` calls ``function(*args)`` on ranks 0 to
    world_size - 1 and returns their results, in rank order. In the function,
    ``torch.distributed`` is initialised (gloo) with that world size, again for every call, so that
    tests do not affect each other; ``dist.get_rank()`` is the rank, and ``rendezvous_store()``
    returns a key-value store that the ranks of this call share.

    The function must be at the top level of a module, such as the test's; arguments and results
    are pickled, tensors by value. Plain ``assert`` in it is fine.

    An exception in a worker is raised here unchanged, the earliest first, with the worker's
    traceback as a note. A worker that dies raises ``WorkerDiedError``, one that does not finish in
    ``timeout_s`` ``WorkerTimeoutError``; either is replaced at the next call. Nothing hangs.
    """

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, _Worker] = {}
        self._calls = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        if not 1 <= world_size <= WORKERS:
            raise ValueError(f"world_size is 1 to {WORKERS}, not {world_size}")
        self._start_missing()
        self._calls += 1
        task = pickle.dumps((function, args))
        for rank in range(world_size):
            self._workers[rank].connection.send((self._calls, world_size, timeout_s, task))
        finished = self._collect(_Round(set(range(world_size))), timeout_s)
        for rank in finished.waiting | set(finished.dead):
            self._kill(rank)
        return self._outcome(finished, function, timeout_s)

    def _collect(self, current: _Round, timeout_s: float) -> _Round:
        deadline = time.monotonic() + timeout_s
        while current.waiting and (left := deadline - time.monotonic()) > 0:
            owners = {self._workers[rank].connection: rank for rank in current.waiting}
            ready = wait(list(owners), left)
            for connection in [each for each in owners if each in ready]:
                rank = owners[connection]
                current.waiting.discard(rank)
                try:
                    kind, when, payload = connection.recv()
                except (EOFError, ConnectionError):
                    current.dead[rank] = self._workers[rank].process.wait(GRACE_S)
                else:
                    if kind == "result":
                        current.results[rank] = pickle.loads(payload)
                    else:
                        current.errors.append((when, rank, _unpacked(payload)))
                if current.errors or current.dead:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return current

    def _outcome(
        self, finished: _Round, function: Callable[..., Any], timeout_s: float
    ) -> list[Any]:
        if finished.dead:
            rank, code = min(finished.dead.items())
            message = f"rank {rank} died in {function.__name__} (exit code {code})"
            for _, other, error in sorted(finished.errors, key=lambda each: each[:2]):
                message += f"\nrank {other} raised {error!r}"
            raise WorkerDiedError(message, rank, finished.results)
        if finished.errors:
            raise min(finished.errors, key=lambda each: each[:2])[2]
        if finished.waiting:
            raise WorkerTimeoutError(
                f"ranks {sorted(finished.waiting)} did not finish {function.__name__} in "
                f"{timeout_s} s"
            )
        return [finished.results[rank] for rank in sorted(finished.results)]

    def _start_missing(self) -> None:
        for rank, worker in list(self._workers.items()):
            if worker.process.poll() is not None:
                self._kill(rank)
        for rank in range(WORKERS):
            if rank not in self._workers:
                here, there = multiprocessing.Pipe()
                with there:  # otherwise the pipe would stay open after the process ends
                    process = self._fork_server.start(
                        *(serve, rank, there.fileno(), self._store.port),
                        environment=dict(os.environ),
                        files=[there.fileno()],
                    )
                self._workers[rank] = _Worker(process, here)

    def _kill(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()

    def close(self) -> None:
        for rank in list(self._workers):
            self._kill(rank)


def _unpacked(payload: tuple[bytes | None, str]) -> BaseException:
    pickled, text = payload
    if pickled is None:
        return WorkerError(text)
    error: BaseException = pickle.loads(pickled)
    error.add_note(text)
    return error


# --- in the worker -------------------------------------------------------------------------------

_store: Store | None = None


def rendezvous_store() -> Store:
    """In a worker: a new client of a store that the ranks of this call share."""
    if _store is None:
        raise RuntimeError("rendezvous_store() is for functions that run in the pool")
    return _store.clone()


def serve(rank: int, file: int, port: int) -> None:
    """A worker's main loop: run what comes through the pipe until it closes."""
    connection: Connection[Any, Any] = Connection(file)
    torch.set_num_threads(1)
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # host names need not resolve
    client = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            call, world_size, timeout_s, task = connection.recv()
        except EOFError:
            return
        connection.send(_answer(rank, PrefixStore(f"{call}", client), world_size, timeout_s, task))


def _answer(
    rank: int, store: Store, world_size: int, timeout_s: float, task: bytes
) -> tuple[str, float, Any]:
    """The kind of answer, when it was known, and the result or error."""
    global _store
    _store = store
    try:
        _join_group(rank, store.clone(), world_size, timeout_s)
        function, args = pickle.loads(task)
        return "result", time.monotonic(), pickle.dumps(function(*args))
    except Exception as error:
        answer = "error", time.monotonic(), _packed(rank, error)
    # The error is gone, and with it the frames that kept the group: so this closes the connections
    # and ends collectives in which others wait for this rank.
    gc.collect()
    _leave_group()
    return answer


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, store: Store, world_size: int, timeout_s: float) -> None:
    """Create a new process group, and leave the previous one once all its ranks are done with it.

    A rank that closed its connections earlier would break a slower one's. For the same reason no
    rank continues before all are connected.
    """
    _leave_group()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if store.add("connected", 1) == world_size:
        store.set("all connected", "yes")
    store.wait(["all connected"], timeout)


def _packed(rank: int, error: Exception) -> tuple[bytes | None, str]:
    text = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle but do not unpickle
    except Exception:
        return None, text
    return pickled, text
