"""The rank processes that this process starts, and its private connections to them.

Each rank has a socket to rank 0 without an address, so no other process can connect to it. It also
has a pipe whose other end rank 0 holds, so that it notices when rank 0 ends for any reason
(``worker.py``). Neither is inherited by programs that this process starts, or by its forks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from ostinato.errors import RankFailedError

_LENGTH = struct.Struct("<q")
_READY, _GO = b"r", b"g"
_LEAVE_S = 5.0  # for ranks that are leaving
# Losing a rank is an error, even in a program where SIGPIPE is fatal.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class RankProcesses:
    """The processes of ranks 1 to ``world_size`` - 1. This one is rank 0.

    ``launch`` starts them; if it fails or is interrupted, ``stop`` ends the ones that exist.

    Args:
        environment: Variables for the ranks, added to this process's environment.
    """

    def __init__(self, world_size: int, environment: dict[str, str]) -> None:
        self._world_size = world_size
        self._environment = {**os.environ, "PYTHONPATH": _python_path(), **environment}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        _started.add(self)

    def launch(self, message: Any) -> None:
        """Start all ranks, and send each ``message``; ``RankConnection.launched`` returns it."""
        data = pickle.dumps(message)
        for rank in range(1, self._world_size):
            try:
                self._start(rank)
            except OSError as error:
                raise RankFailedError(
                    f"could not start the process of rank {rank}: {error}; free memory, raise "
                    "the limits of processes and open files (ulimit -u, ulimit -n), or use fewer "
                    "ranks",
                    rank,
                ) from error
            with contextlib.suppress(ConnectionError):  # it has ended; ``dead`` says how
                self._sockets[-1].sendall(_LENGTH.pack(len(data)) + data, _FLAGS)

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        self._sockets.append(here)
        module = "ostinato.ranks.worker"
        arguments = (str(number) for number in (there.fileno(), os.getpid(), rank))
        with there:
            process = subprocess.Popen(
                # -P: do not import modules from the current directory.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,  # never written to; closed when this process ends
                bufsize=0,
                pass_fds=(there.fileno(),),
                env=self._environment,
                start_new_session=True,  # Ctrl-C goes to rank 0 only, which tells the others
            )
        self._processes.append(process)

    def wait_for_all(self, timeout_s: float) -> None:
        """Return when all ranks are ready, and tell them so."""
        deadline = time.monotonic() + timeout_s
        missing = dict(zip(self._sockets, range(1, self._world_size), strict=True))
        while missing:
            for each in wait(list(missing), 0.1):
                assert isinstance(each, socket.socket), "only sockets were passed in"
                with contextlib.suppress(ConnectionError):
                    if each.recv(1) == _READY:
                        del missing[each]
            failure = self.dead()
            if failure is None and missing and time.monotonic() > deadline:
                first = min(missing.values())
                failure = RankFailedError(
                    f"rank {first} was not ready {timeout_s:.0f} s after its start; check its "
                    "log, and whether the machine has enough memory and cores for all ranks",
                    first,
                )
            if failure is not None:
                raise failure
        for each in self._sockets:
            with contextlib.suppress(ConnectionError):
                each.sendall(_GO, _FLAGS)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send ``tensor`` (contiguous, on the CPU) to all; blocks while a rank does not read."""
        data = tensor.numpy().data.cast("B")
        for rank, each in enumerate(self._sockets, 1):
            try:
                each.sendall(data, _FLAGS)
            except OSError as error:
                raise dist.DistNetworkError(
                    f"the connection to rank {rank} broke: {error}"
                ) from error

    def dead(self) -> RankFailedError | None:
        """The first rank whose process has ended, if any."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                return RankFailedError(f"the process of rank {rank} {how}", rank)
        return None

    def kill(self) -> None:
        """Kill all rank processes and reap them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def stop(self, *, grace_s: float = _LEAVE_S) -> None:
        """Wait briefly for leaving ranks, and kill the rest. Calling it twice is harmless."""
        try:
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
                time.sleep(0.01)
        finally:
            self.kill()
            self._let_go()

    def _let_go(self) -> None:
        """Close this process's ends of all connections."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for each in self._sockets:
            each.close()


class RankConnection:
    """A started rank's end of the connection to rank 0."""

    def __init__(self, file: int) -> None:
        self._socket = socket.socket(fileno=file)
        self._socket.set_inheritable(False)

    def launched(self) -> Any:
        """The message that rank 0 passed to ``launch``. Only the parent process can send it."""
        (length,) = _LENGTH.unpack(self._receive(bytearray(_LENGTH.size)))
        return pickle.loads(self._receive(bytearray(length)))

    def wait_for_all(self) -> None:
        """Tell rank 0 that this rank is ready, and return when all are."""
        self._socket.sendall(_READY, _FLAGS)
        self._receive(bytearray(len(_GO)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receive what rank 0 broadcasts into ``tensor``, of the same size."""
        self._receive(tensor.numpy().data.cast("B"))

    def _receive(self, buffer: bytearray | memoryview) -> bytearray | memoryview:
        view, size = memoryview(buffer), len(buffer)
        done = 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise dist.DistNetworkError(f"the connection to rank 0 broke: {error}") from error
            if not count:
                raise dist.DistNetworkError("the connection to rank 0 broke: it was closed")
            done += count
        return buffer


def _python_path() -> str:
    """Search path for the ranks' modules: this process's, in the same order."""
    given = (
        [] if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )
    here = [path or os.getcwd() for path in sys.path]
    return os.pathsep.join(dict.fromkeys([*filter(None, given), *here]))


_started: weakref.WeakSet[RankProcesses] = weakref.WeakSet()


def _let_go_in_fork() -> None:
    """Close the pipes in a fork, which would otherwise keep the ranks alive after this process."""
    for processes in list(_started):
        processes._let_go()


os.register_at_fork(after_in_child=_let_go_in_fork)
