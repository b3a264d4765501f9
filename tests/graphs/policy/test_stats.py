"""Counts of what ran: replays by key, padding, eager runs by reason."""

from __future__ import annotations

from time import monotonic

from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice, Reason
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode

EIGHT, FOUR = BatchDescriptor(8), BatchDescriptor(4)


def replay_of(descriptor: BatchDescriptor) -> Choice:
    return Choice(mode=CUDAGraphMode.PIECEWISE, descriptor=descriptor, reason=Reason.MIXED)


def eager(num_tokens: int, reason: Reason) -> Choice:
    descriptor = BatchDescriptor(num_tokens)
    return Choice(mode=CUDAGraphMode.NONE, descriptor=descriptor, reason=reason)


def is_empty(stats: DispatchStats) -> bool:
    return not any(
        (stats.replays, stats.eager, stats.replayed_tokens, stats.padding_tokens, stats.hits)
    )


def test_nothing_recorded() -> None:
    stats = DispatchStats()
    assert (stats.hits, stats.misses, stats.padding_fraction) == (0, 0, 0.0)


def test_replays_are_counted_by_key_with_their_padding() -> None:
    stats = DispatchStats()
    stats.record(replay_of(EIGHT), 5)
    stats.record(replay_of(EIGHT), 8)
    stats.record(replay_of(FOUR), 3)
    assert stats.replays == {EIGHT: 2, FOUR: 1}
    assert (stats.hits, stats.misses) == (3, 0)
    assert (stats.replayed_tokens, stats.padding_tokens) == (16, 4)
    assert stats.padding == {EIGHT: 3, FOUR: 1}
    assert stats.padding_fraction == 0.2


def test_the_last_use_of_a_key_is_when_it_ran_not_when_it_was_read() -> None:
    stats = DispatchStats()
    before = monotonic()
    stats.record(replay_of(EIGHT), 5)
    between = monotonic()
    stats.record(replay_of(FOUR), 3)
    after = monotonic()
    stats.record(eager(9, Reason.TOO_LARGE), 9)
    assert list(stats.last_used) == [EIGHT, FOUR]
    assert before <= stats.last_used[EIGHT] <= between <= stats.last_used[FOUR] <= after
    stats.reset()
    assert stats.last_used == stats.padding == {}


def test_eager_runs_are_counted_by_reason_and_have_no_padding() -> None:
    stats = DispatchStats()
    stats.record(eager(9, Reason.TOO_LARGE), 9)
    stats.record(eager(9, Reason.TOO_LARGE), 9)
    stats.record(eager(3, Reason.NOT_CAPTURED), 3)
    assert stats.eager == {Reason.TOO_LARGE: 2, Reason.NOT_CAPTURED: 1}
    assert (stats.hits, stats.misses) == (0, 3)
    assert (stats.replayed_tokens, stats.padding_tokens) == (0, 0)
    assert stats.padding_fraction == 0.0


def test_reset_starts_again() -> None:
    stats = DispatchStats()
    stats.record(replay_of(EIGHT), 5)
    stats.record(eager(9, Reason.TOO_LARGE), 9)
    stats.reset()
    assert is_empty(stats)


def test_two_stats_share_nothing() -> None:
    one, other = DispatchStats(), DispatchStats()
    one.record(replay_of(EIGHT), 8)
    assert is_empty(other)
    assert not is_empty(one)


def test_a_choice_that_comes_again_and_again_is_counted_whenever_one_looks() -> None:
    stats, choice, other = DispatchStats(), replay_of(EIGHT), eager(9, Reason.TOO_LARGE)
    for count in range(1, 4):
        stats.record(choice, 5)
        assert (stats.hits, stats.padding_tokens) == (count, 3 * count)
    stats.record(other, 9)
    stats.record(choice, 8)
    stats.record(choice, 8)
    assert (stats.replays, stats.eager) == ({EIGHT: 5}, {Reason.TOO_LARGE: 1})
    assert (stats.replayed_tokens, stats.padding_tokens) == (31, 9)
