"""The watchdog: tells every rank which rank died, hangs or gave up.

A daemon thread on each rank writes beats to a shared key-value store and reads the beats of the
others. Ages are measured by the reader's clock, from when it saw a beat change, so the clocks of
several machines need not agree. They count only while the reader runs, so a pause of all ranks (a
suspended machine) is not a failure. A store whose host is stopped does not answer, and blocks
that thread; a second thread, which never touches the store, detects that.

A beat means that the process runs Python: a killed, stopped or GIL-holding process stops beating. A
rank whose main thread hangs in its own code still beats, so a beat includes that thread's progress,
and every rank compares (``progress.py``). A rank that finds a failure names it in its last beat, so
that the others report the same cause, and not that this rank left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from ostinato.errors import ConfigError, RankFailedError
from ostinato.ranks.watch.beats import GOODBYE, Beats, Store
from ostinato.ranks.watch.progress import HungRanks, Progress


class Watchdog:
    """Beats for this rank and watches the others, from construction to ``close()``.

    When a rank dies, the others know before its last beat is ``timeout_s + interval_s`` old; an
    error that it reported is known after one interval. A rank that has not moved for that long
    while others wait for it is known to all, itself included; a delay shorter than
    ``timeout_s - 3 * interval_s`` never counts as a hang. From then on ``check()`` raises, and
    ``on_failure`` has been called once, from a watchdog thread. ``on_failure`` is for main threads
    that are stuck in a collective with the dead rank: see ``end_process``. A store that does not
    answer for that long is treated the same, but ``check()`` stops raising if it answers again.

    Used in ``with``, an exception of the block is reported to the others. ``close()`` says goodbye:
    a rank that left on purpose has not failed.

    Args:
        timeout_s: How old a heartbeat may get. A rank that has not started its watchdog has the
            same time, counted from the start of this one: start them after a barrier.
        rank: This rank.
        store: A store that all ranks share. Give the watchdog its own client
            (``TCPStore.clone()``): a client that waits for a key blocks all its users. A
            ``FileStore`` grows with every beat.
        world_size: The number of ranks.
        interval_s: Time between beats; a tenth of the timeout if None.
        store_rank: The rank that hosts the store, for the error if the store is gone.
        progress: The progress of this rank's main thread. Pass it on all ranks or on none; without
            it main threads are not watched.
        on_failure: Called with the error, in a watchdog thread.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        store: Store,
        *,
        world_size: int,
        interval_s: float | None = None,
        store_rank: int | None = None,
        progress: Progress | None = None,
        on_failure: Callable[[RankFailedError], None] | None = None,
    ) -> None:
        self.interval_s = timeout_s / 10 if interval_s is None else interval_s
        if not 0 < self.interval_s <= timeout_s / 4:
            raise ConfigError(
                f"interval_s is {self.interval_s} and timeout_s is {timeout_s}: the interval "
                "must be positive and at most a quarter of the timeout"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not in the range 0 to {world_size - 1}")
        self.timeout_s = timeout_s
        self.rank = rank
        self._beats = Beats(rank, store)
        self._store_rank = store_rank
        self._on_failure = on_failure
        self._failure: RankFailedError | None = None
        self._closing = threading.Event()
        self._num_beats = 0
        self._told = threading.Lock()  # acquired by the first caller of on_failure, and kept
        self._last_pass = time.monotonic()
        self._watched_s = 0.0
        self._answers = 0  # number of answers from the store
        self._silent_s = 0.0  # time since the last one
        # Per watched rank: the last beat seen, and _watched_s when it was first seen.
        self._seen = {other: ("", 0.0) for other in range(world_size) if other != rank}
        # Two intervals early: one until a beat carries a rank's position, one until it is read.
        self._hung = HungRanks(rank, timeout_s - 2 * self.interval_s, progress)
        self._threads = [
            threading.Thread(target=loop, name=f"watchdog {rank}", daemon=True)
            for loop in (self._watch, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise ``RankFailedError`` if a rank failed. No communication."""
        if self._failure is not None:
            raise self._failure
        silence = self._silence()
        if silence is not None and not self._closing.is_set():
            raise silence

    def report(self, message: str) -> None:
        """Tell the other ranks that this one failed, and why."""
        self._beats.tell_error(message)

    def reported(self, rank: int | None) -> RankFailedError | None:
        """What ``rank`` reported when it left: its own error, or the failure it found; else None.

        Queries the store.
        """
        try:
            if rank is not None:
                self._beats.of(rank)
        except RankFailedError as failure:
            return failure
        except Exception:  # the store died with its host
            return None
        return None

    def close(self) -> None:
        """Leave: the others stop watching this rank.

        The threads have ended on return, except one that waits for a store that does not answer.
        """
        if not self._closing.is_set():
            self._closing.set()
            own = threading.current_thread()
            for thread in self._threads:
                if thread is not own:
                    thread.join(self.timeout_s)
            blocked = any(thread.is_alive() for thread in self._threads if thread is not own)
            if self._failure is None and not blocked:
                self._beats.say_goodbye()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._failure is None:
            self.report(f"{type(error).__name__}: {error}")
        self.close()

    # --- the threads -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.is_set():
            failure = None
            try:
                self._pass()
            except MemoryError:
                pass  # perhaps over by the next beat; if not, this rank falls silent
            except RankFailedError as found:
                failure = found
                # If the store does not answer here, the other thread notices: no failure is set.
                with contextlib.suppress(Exception):
                    self._beats.tell_finding(found)
            except Exception as error:
                # A store whose host is gone may raise any error.
                failure = self._store_failure(f"failed ({error})")
            if failure is not None:
                self._failure = failure
                self._tell(failure)
                return
            self._wait()

    def _watch_store(self) -> None:
        """Measure how long the store has been silent, counting only while this process runs."""
        answers, last = self._answers, time.monotonic()
        while self._failure is None and not self._wait():
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.interval_s), now
            self._silent_s = self._silent_s + passed if answers == self._answers else 0.0
            answers = self._answers
            silence = self._silence()
            if silence is not None:
                self._tell(silence)

    def _wait(self) -> bool:
        """For an interval, or until ``close()``, which is True. Waiting takes memory as well."""
        try:
            return self._closing.wait(self.interval_s)
        except MemoryError:
            time.sleep(self.interval_s)
            return self._closing.is_set()

    def _silence(self) -> RankFailedError | None:
        silent_s = self._silent_s
        # One interval early, as for beats.
        if silent_s <= self.timeout_s - self.interval_s:
            return None
        return self._store_failure(f"has not answered for {silent_s:.1f} s")

    def _tell(self, failure: RankFailedError) -> None:
        if self._on_failure is not None and self._told.acquire(blocking=False):
            self._on_failure(failure)

    def _pass(self) -> None:
        """Beat, then check every other rank once. Raises the first failure."""
        now = time.monotonic()
        self._watched_s += min(now - self._last_pass, 2 * self.interval_s)
        self._last_pass = now
        self._num_beats += 1
        self._beats.beat(f"{self._num_beats} {self._hung.own_report()}")
        self._answers += 1
        for other in tuple(self._seen):
            self._look_at(other, self._beats.of(other))
            self._answers += 1
        self._hung.look(self._watched_s, self._is_beating)

    def _look_at(self, other: int, beat: str) -> None:
        if beat == GOODBYE:
            del self._seen[other]
            self._hung.forget(other)
            return
        last, since = self._seen[other]
        if beat != last:
            self._seen[other] = (beat, self._watched_s)
            self._hung.hear(other, beat.partition(" ")[2])
            return
        age = self._watched_s - since
        # One interval early: a beat can already be that old when it is first seen.
        if age > self.timeout_s - self.interval_s:
            what = "stopped beating" if beat else "never started beating"
            raise RankFailedError(
                f"rank {other} {what}: no beat for {age:.1f} s (the timeout is "
                f"{self.timeout_s} s); it died or hangs, see its log",
                other,
            )

    def _is_beating(self, rank: int) -> bool:
        return rank == self.rank or self._watched_s - self._seen[rank][1] < self.timeout_s / 2

    def _store_failure(self, what: str) -> RankFailedError:
        host = "" if self._store_rank is None else f", which rank {self._store_rank} hosts,"
        return RankFailedError(
            f"the store that the ranks beat through{host} {what}; the process that hosts it died "
            "or hangs, or the network is down",
            self._store_rank,
        )


def end_process(error: RankFailedError) -> None:
    """An ``on_failure`` that ends this process at once, whatever its main thread waits for.

    It cleans up nothing: there is no other way out of a collective that waits for a dead rank.
    """
    sys.stderr.write(f"ostinato: this process exits because {error}\n")
    sys.stderr.flush()
    os._exit(1)
