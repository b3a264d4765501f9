"""Chooses a replica for each new request: by the tokens it has left to compute, and its load."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.scheduling.prefix_cache import PrefixReuse
from ostinato.scheduling.request import Request
from ostinato.scheduling.scheduler import Scheduler


class Placement:
    """Spreads requests over replicas, one per scheduler.

    A replica's cost is the number of tokens of its unfinished requests, plus those of the new
    request that its prefix cache lacks. The lowest cost wins, then the lowest number. So a request
    goes where its prefix is cached, unless that replica has more work than the prefix saves.

    ``loads`` counts the tokens of unfinished requests. Set it to None when requests have grown.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self._prefixes = [PrefixReuse(scheduler.allocator) for scheduler in schedulers]
        self.loads: list[int] | None = None

    def choose(self, request: Request) -> int:
        """The replica for ``request``, which is to be added there."""
        if len(self._schedulers) == 1:
            return 0
        loads = self.loads
        if loads is None:
            loads = self.loads = [each.num_unfinished_tokens for each in self._schedulers]
        costs = [
            load - prefixes.num_cached_tokens(request)
            for load, prefixes in zip(loads, self._prefixes, strict=True)
        ]
        replica = costs.index(min(costs))
        loads[replica] += request.num_tokens
        return replica
