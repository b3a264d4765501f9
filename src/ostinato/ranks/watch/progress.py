"""Tracks how far each rank has come, and finds the rank that holds up the others.

Rank 0 leads the others from step to step (a batch to run, a result to share, the end), and all make
the same collective calls in each step. So positions are comparable: no rank gets far ahead of the
slowest one, which is the one the others wait for. A rank's main thread records its position; the
watchdog thread sends it to the other ranks and evaluates theirs here.

Work on a device is not visible: if all main threads are equally far, no rank is blamed, however
long the step takes. The same goes for start-up, before rank 0 begins its first step.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ostinato.errors import RankFailedError

logger = logging.getLogger(__name__)


class Stage(enum.IntEnum):
    """The stages of a step, in the order in which all ranks together reach them."""

    ANNOUNCED = 0  # rank 0 has begun the step, and not told the others
    AWAITED = 1  # another rank is ready for it
    RUNNING = 2  # rank 0 sends it, or another rank has received it
    DONE = 3


class Position(NamedTuple):
    """Where a rank is. Positions are ordered: the smaller one is behind."""

    step: int = 0
    stage: Stage = Stage.DONE
    num_calls: int = 0  # collective calls since the start, except those in CUDA graphs

    @property
    def doing(self) -> str:
        """What a rank at this position has been doing, to follow the word "has"."""
        if self.stage is Stage.ANNOUNCED:
            return f"been about to send step {self.step}"
        if self.stage is Stage.AWAITED:
            return f"been receiving step {self.step}"
        if self.stage is Stage.RUNNING:
            return f"been in step {self.step}"
        return f"not reached step {self.step + 1}"

    def encoded(self) -> str:
        return f"{self.step} {int(self.stage)} {self.num_calls}"

    @classmethod
    def decoded(cls, text: str) -> Position:
        step, stage, num_calls = (int(word) for word in text.split())
        return cls(step, Stage(stage), num_calls)


class Progress:
    """The position of the thread that creates it.

    Only that thread calls the methods that update it, which cost one assignment; any thread may
    read it.

    Args:
        num_calls: Returns how many collectives this rank has called. Called by reading threads.
    """

    def __init__(self, num_calls: Callable[[], int] = lambda: 0) -> None:
        self._at = (0, Stage.DONE)  # one tuple, so that both values are read together
        self._num_calls = num_calls
        self._thread = threading.get_ident()

    def announce(self) -> None:
        """On rank 0: begin the next step."""
        self._at = (self._at[0] + 1, Stage.ANNOUNCED)

    def expect(self) -> None:
        """On any other rank: the last step is done and the next one may arrive."""
        self._at = (self._at[0] + 1, Stage.AWAITED)

    def run(self) -> None:
        """This rank has the step: it is being sent, or was received."""
        self._at = (self._at[0], Stage.RUNNING)

    def finish(self) -> None:
        """This rank's part of the step is over. Errors are reported separately."""
        self._at = (self._at[0], Stage.DONE)

    def position(self) -> Position:
        return Position(*self._at, self._num_calls())

    def where(self) -> str:
        """The stack of the thread."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"


def ranks_behind(positions: Mapping[int, Position]) -> list[int]:
    """The ranks that hold up the others now, from the last known positions.

    A rank that has not finished what rank 0 began owes that to the others. Of these ranks, the ones
    furthest behind are returned, if any rank is ahead of them: those in between may be waiting
    themselves. Rank 0 owes nothing between two steps, nor do the others once the last one is done.
    """
    if 0 not in positions:
        return []
    begun = positions[0].step
    owing = {
        rank: position
        for rank, position in positions.items()
        if (position.step, position.stage) < (begun, Stage.DONE)
    }
    if not owing:
        return []
    least = min(owing.values())
    if max(positions.values()) == least:
        return []
    return sorted(rank for rank, position in owing.items() if position == least)


class HungRanks:
    """Finds ranks that beat, yet hold up the others for too long. Used by one watchdog thread.

    Args:
        rank: This rank.
        after_s: How long a rank may stay in place behind another before it counts as hung.
        own: This rank's progress. None if progress is not watched.
    """

    def __init__(self, rank: int, after_s: float, own: Progress | None) -> None:
        self._rank = rank
        self._after_s = after_s
        self._own = own
        self._positions: dict[int, Position] = {}
        # Position of each rank that holds up others, and since when, by the clock of ``look``.
        self._since: dict[int, tuple[Position, float]] = {}
        self._shown: Position | None = None  # this rank's position when it was last logged

    def own_report(self) -> str:
        """The report to send to the other ranks now."""
        if self._own is None:
            return ""
        position = self._positions[self._rank] = self._own.position()
        return position.encoded()

    def hear(self, rank: int, report: str) -> None:
        """Take in another rank's report."""
        if report:
            self._positions[rank] = Position.decoded(report)

    def forget(self, rank: int) -> None:
        """Drop a rank that has left."""
        self._positions.pop(rank, None)

    def look(self, now: float, is_beating: Callable[[int], bool]) -> None:
        """Raise for the first hung rank, if any. Call it after hearing all ranks.

        While any rank is not beating, none is blamed: the others may be waiting for that one, which
        will be found dead.
        """
        before, self._since = self._since, {}
        for rank in ranks_behind(self._positions):
            position = self._positions[rank]
            last, since = before.get(rank, (None, now))
            self._since[rank] = (position, since if last == position else now)
        if self._rank in self._since:
            self._show_own_place(now - self._since[self._rank][1])
        late = {
            rank: now - since
            for rank, (_, since) in self._since.items()
            if now - since > self._after_s
        }
        if late and all(is_beating(rank) for rank in self._positions):
            raise RankFailedError(self._why(late), min(late))

    def _why(self, late: Mapping[int, float]) -> str:
        """Explain a hang of ranks at the same position. ``late``: seconds by rank."""
        ranks, position = sorted(late), self._positions[min(late)]
        ahead = min(rank for rank, other in self._positions.items() if other > position)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {ranks}"
        return (
            f"{who} has {position.doing} for {min(late.values()):.1f} s or more while rank {ahead} "
            "waits for it: its main thread hangs or is slow; its log shows where. Raise "
            "rank_timeout_s if it was only slow"
        )

    def _show_own_place(self, age: float) -> None:
        """Log once, before the timeout, where this rank's main thread is."""
        own = self._positions[self._rank]
        if self._own is not None and age > self._after_s / 2 and own != self._shown:
            self._shown = own
            logger.warning(
                "rank %d has held up the others for %.1f s or more, here:\n%s",
                self._rank,
                age,
                self._own.where(),
            )
