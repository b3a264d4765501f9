"""The process of a rank that ``LLM`` started: ``python -m ostinato.runtime.parallel.worker``.

Joins the world, builds its part of the model and follows rank 0 until that leaves. An error here is
told to the other ranks, and ends this one.
"""

from __future__ import annotations

import signal
import sys
import traceback

from ostinato.errors import OstinatoError, RankFailedError
from ostinato.runtime.parallel.launch import join_started
from ostinato.runtime.parallel.start import start_rank
from ostinato.runtime.parallel.steps import FollowingRunner


def main(port: int, rank: int) -> int:
    """The exit code of rank ``rank`` of the world whose store is at ``port``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which says what follows
    try:
        config, world = join_started(port, rank)
    except Exception as error:  # there is no world to report it through
        where = "" if isinstance(error, OstinatoError) else traceback.format_exc()
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"ostinato: rank {rank} could not join ({what})\n{where}")
        return 1
    try:
        _, runner, _ = start_rank(config, world)
        assert isinstance(runner, FollowingRunner), "rank 0 is nobody's worker"
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
