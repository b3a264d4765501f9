"""Starts the ranks of an ``LLM`` as forks, in place of ``subprocess.Popen``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forked_processes import ForkedProcess, ForkServer


class RankStarter:
    """Called as ``RankProcesses`` calls ``subprocess.Popen``, and for nothing else."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __call__(
        self,
        command: list[str],
        *,
        stdin: int,
        bufsize: int,
        pass_fds: tuple[int, ...],
        env: dict[str, str],
        start_new_session: bool,
    ) -> ForkedProcess:
        assert command[:4] == [sys.executable, "-P", "-m", "ostinato.ranks.worker"]
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", bufsize), os.fdopen(writing, "wb", bufsize)
        return self._server.start(
            *(run_rank, command[4:]),
            environment=env,
            files=pass_fds,
            stdin=pipe,
            new_session=start_new_session,
        )


def run_rank(arguments: list[str]) -> int:
    """As ``python -m ostinato.ranks.worker`` does, a ``sitecustomize`` of the tests included."""
    from ostinato.ranks import worker

    sys.argv = ["-m", *arguments]
    for directory in os.environ["PYTHONPATH"].split(os.pathsep):
        file = Path(directory) / "sitecustomize.py"
        if file.exists():
            exec(compile(file.read_text(), file, "exec"), {"__name__": "sitecustomize"})
            break
    sys.argv[0] = worker.__file__
    return worker.main(*map(int, arguments))
