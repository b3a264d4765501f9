"""Which rank holds up the others: the rule on a model of the ranks, and its clock; no processes."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import RankFailedError
from ostinato.parallel.layout import ParallelLayout
from ostinato.ranks.channel import Channel
from ostinato.ranks.plan_message import Kind
from ostinato.ranks.watch.beats import Beats
from ostinato.ranks.watch.progress import (
    HungRanks,
    Position,
    Progress,
    Stage,
    ranks_behind,
)
from ostinato.ranks.watch.watchdog import Watchdog

ANNOUNCED, AWAITED, RUNNING, DONE = Stage
AFTER_S = 8.0

# --- ranks that are not processes ----------------------------------------------------------------

# A rank yields what it waits for: a function that says whether it may continue.
Wait = Callable[[], bool]


def nothing() -> bool:
    return True


@dataclass
class Model:
    """Ranks that step like ours. Everything between two waits happens at once.

    With ``on_device``, collectives block a device and not the calling rank, and are not counted;
    rank 0 waits for each step's results, for which all ranks must have started it.
    """

    layout: ParallelLayout
    num_steps: int
    num_collectives: int
    on_device: bool

    def __post_init__(self) -> None:
        self.size = self.layout.world_size
        self.calls = [0] * self.size
        self.progress = [Progress(lambda rank=rank: self.calls[rank]) for rank in range(self.size)]
        self.started = [0] * self.size  # steps whose collectives were all called
        self.ranks = [self.lead(), *(self.follow(rank) for rank in range(1, self.size))]
        self.waits: list[Wait | None] = [nothing] * self.size  # None: has ended

    def lead(self) -> Iterator[Wait]:
        for step in range(1, self.num_steps + 1):
            yield nothing  # between two steps
            self.progress[0].announce()
            yield nothing
            self.progress[0].run()
            yield from self.sent(0, step)
            yield from self.run(0, step)
            self.progress[0].finish()
            if self.on_device:
                yield lambda step=step: min(self.started) >= step  # type: ignore[misc]

    def follow(self, rank: int) -> Iterator[Wait]:
        for step in itertools.count(1):
            yield nothing  # in the script, or still in the step before
            self.progress[rank].expect()
            parent = self.progress[(rank - 1) // 2]
            yield lambda step=step, parent=parent: (  # type: ignore[misc]
                parent.position() >= Position(step, RUNNING)
            )
            yield from self.sent(rank, step)
            self.progress[rank].run()
            yield from self.run(rank, step)

    def sent(self, rank: int, step: int) -> Iterator[Wait]:
        """Messages go down a tree, and are forwarded when the next rank receives."""
        for child in (2 * rank + 1, 2 * rank + 2):
            if child < self.size:
                awaited = Position(step, AWAITED)
                yield lambda child=child, awaited=awaited: (  # type: ignore[misc]
                    self.progress[child].position() >= awaited
                )

    def run(self, rank: int, step: int) -> Iterator[Wait]:
        groups = [self.layout.tensor_group(rank), self.layout.sequence_group(rank)]
        for number in range(self.num_collectives):
            yield nothing
            if not self.on_device:
                self.calls[rank] += 1
                group, count = groups[number % 2], self.calls[rank]
                yield lambda group=group, count=count: (  # type: ignore[misc]
                    min(self.calls[member] for member in group) >= count
                )
        self.started[rank] = step
        yield nothing

    def go_on(self, rank: int) -> bool:
        """Let one rank run to its next wait, if it may."""
        wait = self.waits[rank]
        if wait is None or not wait():
            return False
        self.waits[rank] = next(self.ranks[rank], None)
        return True

    def positions(self) -> dict[int, Position]:
        return {rank: progress.position() for rank, progress in enumerate(self.progress)}

    def owes(self, rank: int) -> bool:
        begun = self.progress[0].position().step
        return self.progress[rank].position()[:2] < (begun, DONE)


models = st.builds(
    Model,
    layout=st.builds(ParallelLayout, sp=st.integers(1, 3), tp=st.integers(1, 3)).filter(
        lambda layout: layout.world_size > 1
    ),
    num_steps=st.integers(0, 3),
    num_collectives=st.integers(0, 3),
    on_device=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(models, st.data())
def test_the_rank_that_hangs_is_named_whoever_else_waits(model: Model, data: st.DataObject) -> None:
    """Anywhere in its code, if it owes anything, and wherever the others are blocked then."""
    hung = data.draw(st.integers(0, model.size - 1), "hung")
    left = data.draw(st.integers(0, 40), "moves until it hangs")
    others = [rank for rank in range(model.size) if rank != hung]
    moved = True
    while moved:
        moved = False
        for rank in data.draw(st.permutations(range(model.size))):
            wait = model.waits[rank]
            # In its own code, and not where it waits for another rank.
            if rank == hung and left <= 0 and wait is nothing:
                continue
            went = model.go_on(rank)
            left -= went and rank == hung
            moved |= went
    ended = model.waits[hung] is not nothing  # it ended before it could hang
    # All others stand still: at the end, waiting for a step that was not begun, or blocked by it.
    assert not any(model.go_on(rank) for rank in others)
    expected = [] if ended or not model.owes(hung) else [hung]
    assert ranks_behind(model.positions()) == expected
    if not expected and hung != 0 and not model.on_device:
        assert model.waits[0] is None, "rank 0 was held up, and no rank is named"


@pytest.mark.slow
@settings(max_examples=100)
@given(models, st.data())
def test_ranks_that_move_are_not_taken_for_hung(model: Model, data: st.DataObject) -> None:
    """Each continues within the time, in any order; rank 0 may take any time between steps."""
    onlooker = HungRanks(model.size, AFTER_S, None)
    now, last = 0.0, dict.fromkeys(range(model.size), (Position(), 0.0))
    while model.waits[0] is not None:
        slow = data.draw(st.sets(st.integers(0, model.size - 1)), "slow")
        for rank, (position, since) in last.items():
            late = now - since > AFTER_S - 2
            while (rank not in slow or late) and model.go_on(rank):
                if model.progress[rank].position() != position:
                    break
        for rank, position in model.positions().items():
            onlooker.hear(rank, position.encoded())
            if position != last[rank][0]:
                last[rank] = (position, now)
        onlooker.look(now, lambda rank: True)
        idle = not any(model.owes(rank) for rank in range(model.size))
        now += data.draw(st.sampled_from([1.0, 10 * AFTER_S])) if idle else 1.0


# --- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "behind"),
    [
        ([(3, DONE, 9), (4, AWAITED, 9)], []),  # rank 0 is idle
        ([(3, DONE, 9), (3, DONE, 9), (4, AWAITED, 9)], []),  # so is rank 1, in its script
        ([(4, ANNOUNCED, 9), (4, AWAITED, 9)], [0]),
        ([(4, RUNNING, 9), (4, AWAITED, 9)], [1]),
        ([(4, RUNNING, 12), (4, RUNNING, 11), (4, RUNNING, 12)], [1]),
        ([(4, RUNNING, 12), (4, RUNNING, 12)], []),  # indistinguishable
        ([(4, RUNNING, 9), (3, DONE, 9), (4, AWAITED, 9), (3, DONE, 9)], [1, 3]),
        ([(4, DONE, 0), (4, RUNNING, 0), (5, AWAITED, 0)], [1]),  # collectives are in a graph
        ([(4, RUNNING, 0), (5, AWAITED, 0), (5, AWAITED, 0)], [0]),
        ([(0, DONE, 7), (0, DONE, 2)], []),  # start-up
    ],
)
def test_who_is_behind(positions: list[tuple[int, Stage, int]], behind: list[int]) -> None:
    by_rank = {rank: Position(*position) for rank, position in enumerate(positions)}
    assert ranks_behind(by_rank) == behind
    del by_rank[0]  # it left, or was not heard yet
    assert ranks_behind(by_rank) == []


def test_a_step_is_with_a_rank_when_it_is_sent_or_received() -> None:
    """Rank 0, and no other rank, is responsible for what it does before it sends."""
    at_broadcast: list[Stage] = []

    class Group:
        def broadcast(self, tensor: torch.Tensor) -> None:
            at_broadcast.append(progress.position().stage)
            tensor[0] = Kind.CLOSE

    progress = Progress()
    channel = Channel(Group(), progress)
    progress.announce()
    assert progress.position() == (1, ANNOUNCED, 0)
    assert ranks_behind({0: progress.position(), 1: Position(1, AWAITED)}) == [0]
    channel.send(Kind.CLOSE, np.empty(0, dtype=np.int64))
    assert at_broadcast == [RUNNING]
    assert ranks_behind({0: progress.position(), 1: Position(1, AWAITED)}) == [1]
    progress.finish()
    assert progress.position() == (1, DONE, 0)

    progress = Progress()
    Channel(Group(), progress).receive()
    assert at_broadcast[1:] == [AWAITED]
    assert progress.position() == (1, RUNNING, 0)


@given(st.builds(Position, st.integers(0), st.sampled_from(Stage), st.integers(0)))
def test_positions_travel(position: Position) -> None:
    assert Position.decoded(position.encoded()) == position


# --- the clock -----------------------------------------------------------------------------------


def watch_of_rank_1() -> tuple[HungRanks, Progress]:
    own = Progress()
    return HungRanks(1, AFTER_S, own), own


def look(watch: HungRanks, now: float, *, beating: bool = True) -> None:
    watch.own_report()
    watch.look(now, lambda rank: beating)


def test_time_counts_from_when_others_are_held_up() -> None:
    watch, own = watch_of_rank_1()
    own.expect()
    for now in (0.0, 1000.0):  # idle for long
        watch.hear(0, "0 3 5")
        look(watch, now)
    watch.hear(0, "1 2 5")  # rank 0 sends it
    look(watch, 1000.0)
    look(watch, 1000.0 + AFTER_S)
    with pytest.raises(RankFailedError) as caught:
        look(watch, 1001.0 + AFTER_S)
    assert caught.value.rank == 1
    assert str(caught.value).startswith(
        "rank 1 has been receiving step 1 for 9.0 s or more while rank 0 waits for it: its main "
    )


def test_a_move_starts_it_again() -> None:
    watch, own = watch_of_rank_1()
    watch.hear(0, "1 2 5")
    look(watch, 0.0)
    own.expect()
    look(watch, AFTER_S + 1)
    own.run()
    look(watch, 2 * AFTER_S + 1)
    watch.forget(0)  # a rank that left needs nothing
    look(watch, 4 * AFTER_S)


def test_none_is_blamed_while_one_is_silent() -> None:
    watch, _ = watch_of_rank_1()
    watch.hear(0, "1 2 5")
    look(watch, 0.0)
    look(watch, 2 * AFTER_S, beating=False)
    with pytest.raises(RankFailedError, match="rank 1 has not reached step 1"):
        look(watch, 2 * AFTER_S)


def test_all_that_are_equally_far_behind_are_named() -> None:
    watch, own = watch_of_rank_1()
    own.expect()
    own.run()
    watch.hear(0, "2 0 0")
    watch.hear(2, "1 2 0")
    look(watch, 0.0)
    with pytest.raises(
        RankFailedError, match=r"each of the ranks \[1, 2\] has been in step 1"
    ) as c:
        look(watch, AFTER_S + 1)
    assert c.value.rank == 1


def test_a_rank_tells_its_log_where_it_is_once(caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = watch_of_rank_1()
    watch.hear(0, "1 2 5")
    with caplog.at_level(logging.WARNING):
        for now in range(int(AFTER_S)):
            look(watch, now)
    (record,) = caplog.records
    assert "rank 1 has held up the others for 5.0 s or more, here:" in record.getMessage()
    assert "in test_a_rank_tells_its_log_where_it_is_once" in record.getMessage()


# --- the watchdogs -------------------------------------------------------------------------------

TIMEOUT_S = 0.8


class MemoryStore(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= set(keys)


def failure_of(dog: Watchdog) -> RankFailedError:
    deadline = time.monotonic() + 10 * TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            dog.check()
        except RankFailedError as failure:
            return failure
        time.sleep(0.005)
    pytest.fail("no failure was seen")


@pytest.mark.slow
def test_all_ranks_come_to_the_same_finding() -> None:
    """Including the rank that hangs but beats, and one that is told before it notices."""
    store, progress = MemoryStore(), [Progress() for _ in range(3)]
    dogs = [
        Watchdog(TIMEOUT_S, rank, store, world_size=3, progress=own)
        for rank, own in enumerate(progress)
    ]
    for own in progress[1:]:
        own.expect()
    time.sleep(1.5 * TIMEOUT_S)  # rank 0 is idle
    for dog in dogs:
        dog.check()
    progress[0].announce()
    progress[0].run()
    progress[2].run()
    failures = [failure_of(dog) for dog in dogs]
    late = Watchdog(TIMEOUT_S, 0, store, world_size=3)
    failures += [failure_of(late), *(dog.reported(2) or failure_of(dog) for dog in dogs)]
    for failure in failures:
        assert failure.rank == 1
        assert str(failure).startswith("rank 1 has been receiving step 1 for")
    for dog in (*dogs, late):
        dog.close()


@pytest.mark.parametrize("rank", [None, 0, 12])
def test_findings_travel(rank: int | None) -> None:
    beats = Beats(3, MemoryStore())
    assert beats.of(3) == ""
    beats.tell_finding(RankFailedError("rank 12: is: gone", rank))
    with pytest.raises(RankFailedError, match=r"^rank 12: is: gone$") as caught:
        beats.of(3)
    assert caught.value.rank == rank
