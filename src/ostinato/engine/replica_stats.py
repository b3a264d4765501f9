"""Counts of one replica of a model: its requests, prefix cache and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ostinato.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class ReplicaStats:
    """Requests now, and what was counted since the start. ``sum`` adds up several."""

    num_running: int = 0
    num_waiting: int = 0
    prefix_query_tokens: int = 0  # looked up in the prefix cache
    prefix_hit_tokens: int = 0  # and found there
    num_replays: int = 0  # steps through graphs
    num_eager: int = 0  # steps without
    replayed_tokens: int = 0
    padding_tokens: int = 0  # beside those replayed

    @classmethod
    def of(cls, scheduler: Scheduler, counts: Sequence[int]) -> ReplicaStats:
        """The stats of a scheduler and a runner's ``DispatchStats.counts``."""
        prefixes = scheduler.allocator.stats
        running, waiting = scheduler.num_running, scheduler.num_waiting
        return cls(running, waiting, prefixes.query_tokens, prefixes.hit_tokens, *counts)

    def __add__(self, other: ReplicaStats) -> ReplicaStats:
        return ReplicaStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __radd__(self, zero: int) -> ReplicaStats:
        return self  # of ``sum``, which starts with 0
