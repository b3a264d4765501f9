"""How far each rank has come, and which rank holds the others up.

Rank 0 leads the others from step to step (a batch to run, a result to share, the end), and all make
the same collective calls in it. So the ranks can be compared: none gets far ahead of the one that
is furthest behind, and that is the one the others wait for. A rank's main thread notes where it is;
the watchdog's carries that to the other ranks, and asks here what it means.

What runs on a device is not seen: ranks whose main threads have all come equally far are nobody's
failure, however long the step takes. Nor is start-up, in which rank 0 has not begun a step.
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
    """Of a step, in the order in which they come about on all ranks together."""

    ANNOUNCED = 0  # rank 0 has begun it, and not told the others
    AWAITED = 1  # another rank is ready for it
    RUNNING = 2  # rank 0 sends it, another rank has received it
    DONE = 3


class Position(NamedTuple):
    """Where a rank is. Positions are ordered: the smaller is behind."""

    step: int = 0
    stage: Stage = Stage.DONE
    num_calls: int = 0  # of collectives, since the start; those in graphs on a GPU do not count

    @property
    def doing(self) -> str:
        """What a rank that is here "has" all the while."""
        if self.stage is Stage.ANNOUNCED:
            return f"been about to send step {self.step}"
        if self.stage is Stage.AWAITED:
            return f"been receiving step {self.step}"
        if self.stage is Stage.RUNNING:
            return f"been in step {self.step}"
        return f"not come to step {self.step + 1}"

    def encoded(self) -> str:
        return f"{self.step} {int(self.stage)} {self.num_calls}"

    @classmethod
    def decoded(cls, text: str) -> Position:
        step, stage, num_calls = (int(word) for word in text.split())
        return cls(step, Stage(stage), num_calls)


class Progress:
    """Where the thread that makes it is, from then on.

    That thread calls the methods that change it, which cost an attribute each; any thread may read.

    Args:
        num_calls: How many collectives this rank has called. Called by the threads that read.
    """

    def __init__(self, num_calls: Callable[[], int] = lambda: 0) -> None:
        self._at = (0, Stage.DONE)  # in one, so that what is read belongs together
        self._num_calls = num_calls
        self._thread = threading.get_ident()

    def announce(self) -> None:
        """On rank 0: the next step begins."""
        self._at = (self._at[0] + 1, Stage.ANNOUNCED)

    def expect(self) -> None:
        """On any other rank: what there was to do is done; the next step may come."""
        self._at = (self._at[0] + 1, Stage.AWAITED)

    def run(self) -> None:
        """The step is with this rank: sent from here on, or received."""
        self._at = (self._at[0], Stage.RUNNING)

    def finish(self) -> None:
        """This rank owes no more in this step. If an error ended it, that is told in other ways."""
        self._at = (self._at[0], Stage.DONE)

    def position(self) -> Position:
        return Position(*self._at, self._num_calls())

    def where(self) -> str:
        """What the thread is executing, call by call."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"


def ranks_behind(positions: Mapping[int, Position]) -> list[int]:
    """Which ranks hold the others up at this moment, by where each was last.

    Whoever has not done what rank 0 has begun owes that to the others. Of these the ranks that are
    furthest behind, if any rank is ahead of them: those in between may wait for them themselves.
    Rank 0 between two steps owes nothing, nor do the others once they have done the last one.
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
    """Finds the ranks that beat, and yet hold the others up too long. For one watchdog's thread.

    Args:
        rank: This rank.
        after_s: For how long a rank is seen not to move, behind another, until it is hung.
        own: Of this rank. None if nobody's progress is watched.
    """

    def __init__(self, rank: int, after_s: float, own: Progress | None) -> None:
        self._rank = rank
        self._after_s = after_s
        self._own = own
        self._positions: dict[int, Position] = {}
        # Of the ranks that hold others up: where, and since when by the clock of ``look``.
        self._since: dict[int, tuple[Position, float]] = {}
        self._shown: Position | None = None  # where this rank was when it told its log

    def own_report(self) -> str:
        """What to tell the other ranks now."""
        if self._own is None:
            return ""
        position = self._positions[self._rank] = self._own.position()
        return position.encoded()

    def hear(self, rank: int, report: str) -> None:
        """What another rank told."""
        if report:
            self._positions[rank] = Position.decoded(report)

    def forget(self, rank: int) -> None:
        """A rank has left."""
        self._positions.pop(rank, None)

    def look(self, now: float, is_beating: Callable[[int], bool]) -> None:
        """Raise if ranks hang, with the first of them. For whenever all ranks were heard.

        While one is not beating none is blamed: others may wait for that, which will be found dead.
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
        """Of ranks that are all in the same place: by rank, for how long."""
        ranks, position = sorted(late), self._positions[min(late)]
        ahead = min(rank for rank, other in self._positions.items() if other > position)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {ranks}"
        return (
            f"{who} has {position.doing} for {min(late.values()):.1f} s or more while rank {ahead} "
            "waits for it: its main thread hangs, or is slow; see its own log for where, and raise "
            "rank_timeout_s if it was only slow"
        )

    def _show_own_place(self, age: float) -> None:
        """Tell this rank's log in time, and once, where its main thread is."""
        own = self._positions[self._rank]
        if self._own is not None and age > self._after_s / 2 and own != self._shown:
            self._shown = own
            logger.warning(
                "rank %d has held the others up for %.1f s or more, here:\n%s",
                self._rank,
                age,
                self._own.where(),
            )
