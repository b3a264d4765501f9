"""Processes that start in milliseconds: forks of one that has imported torch and transformers.

An import takes seconds, and the tests start many ranks. ``ForkServer.start`` runs a function in a
fork of a process that did nothing but import. The fork is a child of the caller all the same, with
the caller's environment, search path, working directory, and output files.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = 8
# What a rank imports sooner or later.
_IMPORTED = (
    "numpy",
    "numba",
    "torch.distributed",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "pytest",
    "ostinato",
    "ostinato.llm",
    "ostinato.ranks.start",
    "ostinato.ranks.steps",
    "ostinato.attention.numba_paged",
    "ostinato.ops.numba.kernels",
)


class ForkedProcess:
    """What ``subprocess.Popen`` is for a process that it started, as far as ranks use it."""

    def __init__(self, pid: int, stdin: Any) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts processes as forks of one that has imported everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, there = socket.socketpair()
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        with there:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "forked_processes", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    # Asking whether there is a GPU must not start the driver: forks could not.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: dict[str, str],
        files: Sequence[int] = (),
        stdin: Any = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Run ``function(*args)`` in a new process, which exits with its result.

        ``files`` are descriptors that it has under the same numbers; ``stdin`` is a pipe whose
        reading end becomes its standard input, and whose writing end the returned object keeps.
        """
        reading, writing = stdin if stdin is not None else (None, None)
        targets = [1, 2, *files, *([] if reading is None else [0])]
        given = [1, 2, *files, *([] if reading is None else [reading.fileno()])]
        task = pickle.dumps(
            {
                "parent": os.getpid(),
                "targets": targets,
                "environment": environment,
                "path": sys.path,
                "directory": os.getcwd(),
                "new_session": new_session,
                "call": pickle.dumps((function, args)),
            }
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # Parent of the process whose own parent exits, and of no other orphan.
        with self._lock:
            _be_subreaper(True)
            try:
                socket.send_fds(self._socket, [len(task).to_bytes(_LENGTH, "little")], given)
                self._socket.sendall(task)
                pid = int.from_bytes(_read(self._socket, _LENGTH), "little")
            finally:
                _be_subreaper(False)
        if reading is not None:
            reading.close()
        return ForkedProcess(pid, writing)

    def close(self) -> None:
        self._socket.close()
        self._server.wait()


def _be_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) != size:
        raise EOFError("the other end of the fork server's socket was closed")
    return data


# --- in the server -------------------------------------------------------------------------------


def serve(connection: socket.socket) -> Any:
    """Fork for every request. Returns in the forks only, with what to call."""
    while True:
        header, files, _, _ = socket.recv_fds(connection, _LENGTH, 16)
        if not header:
            sys.exit()
        task = pickle.loads(_read(connection, int.from_bytes(header, "little")))
        reading, writing = os.pipe()
        between = os.fork()
        if not between and not (pid := os.fork()):
            for file in (connection.detach(), reading, writing):
                os.close(file)
            return _become(task, files)
        if not between:
            os.write(writing, pid.to_bytes(_LENGTH, "little"))
            os._exit(0)
        os.waitpid(between, 0)  # then the caller is the fork's parent
        connection.sendall(os.read(reading, _LENGTH))
        for file in (reading, writing, *files):
            os.close(file)


def _become(task: dict[str, Any], files: list[int]) -> Any:
    """Take over what the caller's process has, and return what to call with which arguments."""
    while os.getppid() != task["parent"]:
        time.sleep(0.0005)
    # Out of the way of the numbers that they are to have.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(high, task["targets"], strict=True):
        os.dup2(file, target)
        os.close(file)
    if task["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["directory"])
    sys.path[:] = task["path"]
    return pickle.loads(task["call"])


def main(file: int) -> NoReturn:
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    function, args = serve(socket.socket(fileno=file))
    sys.exit(function(*args))


if __name__ == "__main__":
    main(int(sys.argv[1]))
