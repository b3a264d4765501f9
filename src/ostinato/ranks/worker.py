"""The process of a rank that ``LLM`` started: ``python -m ostinato.ranks.worker``.

Joins the world, builds its part of the model and follows rank 0 until that leaves. An error here is
told to the other ranks, and ends this one. The end of rank 0's process ends it at any time: that is
seen to first, before torch, which takes seconds, is imported.
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

_ASK_S = 1.0  # how often a rank looks who its parent is


def main(connection: int, parent: int, rank: int) -> int:
    """The exit code of rank ``rank``, whose connection to rank 0, ``parent``, has this number."""
    end_with_parent(_take_stdin(), parent, rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which says what follows
    return _run(connection, rank)


def _run(connection: int, rank: int) -> int:
    from ostinato.errors import OstinatoError, RankFailedError
    from ostinato.ranks.launch import join_started
    from ostinato.ranks.processes import RankConnection
    from ostinato.ranks.start import start_rank
    from ostinato.ranks.steps import FollowingRunner

    try:
        config, world = join_started(RankConnection(connection), rank)
    except Exception as error:  # there is no world to report it through
        where = "" if isinstance(error, OstinatoError) else traceback.format_exc()
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"ostinato: rank {rank} could not join ({what})\n{where}")
        return 1
    try:
        _, runner, _ = start_rank(config, world)
        assert isinstance(runner, FollowingRunner), "only rank 0 leads, and it is no worker"
        runner.follow()
        runner.close()
    except RankFailedError as error:
        sys.stderr.write(f"ostinato: rank {rank} ends because {error}\n")
        return 1
    except OstinatoError:
        return 1  # rank 0 has the same, or was told
    except Exception:
        sys.stderr.write(f"ostinato: rank {rank} failed\n{traceback.format_exc()}")
        return 1
    return 0


# --- the end of rank 0 ---------------------------------------------------------------------------


def _take_stdin() -> int:
    """The pipe that this process was given as its input, whose place an empty one takes."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipe


def end_with_parent(pipe: int, parent: int, rank: int) -> None:
    """End this process when ``parent`` has ended, which holds the other end of ``pipe``.

    Where the kernel can, it kills this process when that end is closed: also if it is stopped, or
    hangs in code that keeps Python's lock. A thread does the same on any system, and notices a
    parent whose end of the pipe lives on in a fork. Not ``PR_SET_PDEATHSIG``, for which the end of
    the thread that started this process is enough.
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
    with contextlib.suppress(OSError):  # stderr may be as gone as rank 0
        os.write(2, f"ostinato: rank {rank} ends because rank 0, {parent}, has\n".encode())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
