"""The process of a rank that ``LLM`` started: ``python -m ostinato.ranks.worker``.

It joins the world, builds its part of the model and follows rank 0 until rank 0 leaves. An error
here is reported to the other ranks and ends this one. If rank 0's process ends, so does this one;
that is set up first, before the import of torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
import traceback

_ASK_S = 1.0  # how often a rank checks its parent


def main(connection: int, parent: int, rank: int) -> int:
    """Run rank ``rank`` over the connection with this descriptor; return the exit code."""
    end_with_parent(_take_stdin(), parent, rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and tells the others
    return _run(connection, rank)


def _run(connection: int, rank: int) -> int:
    from ostinato.errors import OstinatoError, RankFailedError
    from ostinato.ranks.processes import RankConnection
    from ostinato.ranks.rendezvous import join_started
    from ostinato.ranks.start import start_rank
    from ostinato.ranks.steps import FollowingRunner

    try:
        config, world = join_started(RankConnection(connection), rank)
    except Exception as error:  # there is no world yet to report it through
        where = "" if isinstance(error, OstinatoError) else traceback.format_exc()
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"ostinato: rank {rank} could not join ({what})\n{where}")
        return 1
    try:
        _, runner, _ = start_rank(config, world)
        assert isinstance(runner, FollowingRunner), "only rank 0 leads, and it is not a worker"
        runner.follow()
        runner.close()
    except RankFailedError as error:
        sys.stderr.write(f"ostinato: rank {rank} exits because {error}\n")
        return 1
    except OstinatoError:
        return 1  # rank 0 raised the same, or was told
    except Exception:
        sys.stderr.write(f"ostinato: rank {rank} failed\n{traceback.format_exc()}")
        return 1
    return 0


# --- the end of rank 0 ---------------------------------------------------------------------------


def _take_stdin() -> int:
    """Take over the pipe that this process has as stdin, and put an empty stdin in its place."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipe


def end_with_parent(pipe: int, parent: int, rank: int) -> None:
    """End this process when ``parent``, which holds the other end of ``pipe``, has ended.

    If the kernel supports it, it kills this process when that end is closed, even if the process is
    stopped or hangs with the GIL held. A thread does the same on any system, and also notices a
    parent whose end of the pipe survives in a fork. ``PR_SET_PDEATHSIG`` is not used because it
    fires when the thread that started this process ends.
    """
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    threading.Thread(target=_watch, args=(pipe, parent, rank), name="parent", daemon=True).start()


def _watch(pipe: int, parent: int, rank: int) -> None:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while os.getppid() == parent and not poll.poll(_ASK_S * 1000):
        pass
    with contextlib.suppress(OSError):  # stderr may be gone along with rank 0
        os.write(2, f"ostinato: rank {rank} exits because rank 0 (pid {parent}) ended\n".encode())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
