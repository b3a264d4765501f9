"""Chooses capture sizes: those that minimise the expected time of steps within limits.

A batch of ``n`` tokens runs the graph of the smallest size that holds it, so a set of sizes splits
the observed batches into intervals, and each interval costs as much as its upper end. The best
``k`` sizes with the largest at ``j`` follow from the best ``k - 1`` below it:

    best[k][j] = min over i < j of best[k - 1][i] + steps(i, j) * replay(j)

With cumulative counts of steps this is the minimum of lines at ``replay(j)``, and their slopes fall
with ``i``: the lower hull of the lines answers it in logarithmic time. The result is exact for any
costs, even where a larger graph is faster than a smaller one.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int


@dataclass(frozen=True, kw_only=True)
class BatchKind:
    """The batches of one kind, decode or mixed, and what graphs for them cost.

    ``steps``: how many steps have each number of tokens. ``sizes``: those that may be captured.
    ``replay`` and ``eager``: seconds of a step by number of tokens, through a graph and without.
    ``graph_bytes`` and ``graph_seconds``: memory of one graph beside the pool, and time to capture
    it. ``pool_bytes``: memory that graphs share, by the largest of their sizes.
    """

    steps: Mapping[int, float]
    sizes: Sequence[int]
    replay: Callable[[int], float]
    eager: Callable[[int], float]
    graph_bytes: int = 0
    graph_seconds: float = 0.0
    pool_bytes: Callable[[int], int] = lambda _: 0

    def __post_init__(self) -> None:
        for size in (*self.sizes, *self.steps):
            check_positive_int("number of tokens", size)
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    def seconds(self, sizes: Sequence[int]) -> float:
        """The time of all steps with graphs of ``sizes``; without any, all run eagerly."""
        ordered = sorted(sizes)
        total = 0.0
        for num_tokens, count in self.steps.items():
            index = bisect_left(ordered, num_tokens)
            held = index < len(ordered)
            total += count * (self.replay(ordered[index]) if held else self.eager(num_tokens))
        return total

    def bytes_of(self, sizes: Sequence[int]) -> int:
        """Memory of graphs of ``sizes``, the pool included."""
        return len(sizes) * self.graph_bytes + self.pool_bytes(max(sizes)) if sizes else 0


@dataclass(frozen=True, kw_only=True)
class GraphLimits:
    """What graphs of all kinds together may take; None: no limit. ``max_bytes`` has the pool."""

    max_graphs: int | None = None
    max_bytes: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_graphs", "max_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}")
        seconds = self.max_seconds
        if seconds is not None and not (type(seconds) in (int, float) and 0 <= seconds < math.inf):
            raise ConfigError(f"max_seconds must be a number of at least 0, got {seconds!r}")


def choose_sizes(kinds: Sequence[BatchKind], limits: GraphLimits) -> list[tuple[int, ...]]:
    """The sizes of each kind that minimise the time of all steps within ``limits``.

    Of equally fast choices, one with the fewest graphs. Graphs of all kinds share one pool, which
    is as large as the largest of them needs.
    """
    tables = [_Table(kind, _most_graphs(kind, limits)) for kind in kinds]
    best: tuple[float, tuple[int, ...], float] | None = None
    counts = [range(table.max_count + 1) for table in tables]
    for chosen in sorted(itertools.product(*counts), key=sum):
        room = _room_for_pool(kinds, chosen, limits)
        if room is None:
            continue
        seconds = sum(
            table.seconds(count, room) for table, count in zip(tables, chosen, strict=True)
        )
        if best is None or seconds < best[0]:
            best = seconds, chosen, room
    assert best is not None, "no graphs at all are within any limits"
    _, chosen, room = best
    return [table.sizes(count, room) for table, count in zip(tables, chosen, strict=True)]


def _most_graphs(kind: BatchKind, limits: GraphLimits) -> int:
    """The most graphs of one kind that any choice within ``limits`` has."""
    most = [len(kind.sizes)]
    if limits.max_graphs is not None:
        most.append(limits.max_graphs)
    if limits.max_bytes is not None and kind.graph_bytes:
        most.append(limits.max_bytes // kind.graph_bytes)
    if limits.max_seconds is not None and kind.graph_seconds:
        most.append(int(limits.max_seconds / kind.graph_seconds))
    return min(most)


def _room_for_pool(
    kinds: Sequence[BatchKind], counts: Sequence[int], limits: GraphLimits
) -> float | None:
    """Bytes that ``counts`` graphs of each kind leave for the pool; None if they are too many."""
    pairs = list(zip(kinds, counts, strict=True))
    if limits.max_graphs is not None and sum(counts) > limits.max_graphs:
        return None
    seconds = sum(kind.graph_seconds * count for kind, count in pairs)
    if limits.max_seconds is not None and seconds > limits.max_seconds:
        return None
    if limits.max_bytes is None:
        return math.inf
    room = limits.max_bytes - sum(kind.graph_bytes * count for kind, count in pairs)
    return None if room < 0 else room


class _Table:
    """The best sizes of one kind, by their number and by the pool that the largest needs."""

    def __init__(self, kind: BatchKind, max_count: int) -> None:
        self._sizes = sizes = tuple(kind.sizes)
        self.max_count = max_count
        observed = sorted(kind.steps)
        # Steps with at most, and eager time of steps with more, than each number of tokens.
        counts = list(itertools.accumulate((kind.steps[n] for n in observed), initial=0.0))
        eager = [kind.steps[n] * kind.eager(n) for n in observed]
        above = list(itertools.accumulate(reversed(eager), initial=0.0))[::-1]
        ends = [bisect_right(observed, size) for size in sizes]
        held, self._eager_above = [counts[end] for end in ends], [above[end] for end in ends]
        self._all_eager = above[0]
        replay = [kind.replay(size) for size in sizes]
        # By number of sizes from 1: the best time of the batches that the size holds, if it is the
        # largest; and the next smaller size of that choice.
        best = [count * seconds for count, seconds in zip(held, replay, strict=True)]
        self._best = [best]
        self._below: list[list[int]] = [[-1] * len(sizes)]
        for _ in range(1, max_count):
            best, below = _with_one_more(best, held, replay)
            self._best.append(best)
            self._below.append(below)
        # The largest pool so far: a choice of a size needs no less than a smaller one.
        self._pools = list(itertools.accumulate(map(kind.pool_bytes, sizes), max))
        self._largest: dict[tuple[int, int], int] = {}

    def seconds(self, count: int, room: float) -> float:
        """The least time with ``count`` sizes whose pool is at most ``room`` bytes."""
        if count == 0:
            return self._all_eager
        index = self._best_largest(count, room)
        return math.inf if index < 0 else self._total(count, index)

    def sizes(self, count: int, room: float) -> tuple[int, ...]:
        """The choice of that time."""
        index = self._best_largest(count, room) if count else -1
        chosen = []
        while index >= 0:
            chosen.append(self._sizes[index])
            index, count = self._below[count - 1][index], count - 1
        return tuple(reversed(chosen))

    def _total(self, count: int, index: int) -> float:
        return self._best[count - 1][index] + self._eager_above[index]

    def _best_largest(self, count: int, room: float) -> int:
        """The index of the largest size of the best choice; -1 if there is none."""
        end = bisect_right(self._pools, room)
        if (count, end) not in self._largest:
            candidates = range(count - 1, end)
            self._largest[count, end] = min(
                candidates, key=lambda index: self._total(count, index), default=-1
            )
        return self._largest[count, end]


def _with_one_more(
    best: Sequence[float], held: Sequence[float], replay: Sequence[float]
) -> tuple[list[float], list[int]]:
    """The best times with one size more than in ``best``, and the size below each."""
    hull = _LowerHull()
    times, below = [], []
    for index, (count, seconds) in enumerate(zip(held, replay, strict=True)):
        value, smaller = hull.least(seconds)
        times.append(value + count * seconds)
        below.append(smaller)
        if best[index] < math.inf:
            hull.add(-count, best[index], index)
    return times, below


class _LowerHull:
    """The minimum of lines that are added in order of falling slope."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, float, int]] = []
        self._starts: list[float] = []  # where each line begins to be the lowest

    def add(self, slope: float, intercept: float, index: int) -> None:
        lines, starts = self._lines, self._starts
        if lines and lines[-1][0] == slope:
            if lines[-1][1] <= intercept:
                return
            lines.pop()
            starts.pop()
        while lines:
            # Right of this the new line, which falls faster, is below the last one.
            crossing = (intercept - lines[-1][1]) / (lines[-1][0] - slope)
            if crossing > starts[-1]:
                break
            lines.pop()
            starts.pop()
        starts.append(crossing if lines else -math.inf)
        lines.append((slope, intercept, index))

    def least(self, x: float) -> tuple[float, int]:
        """The least value at ``x``, and the line that has it; infinite, and -1, without lines."""
        if not self._lines:
            return math.inf, -1
        slope, intercept, index = self._lines[bisect_right(self._starts, x) - 1]
        return slope * x + intercept, index
