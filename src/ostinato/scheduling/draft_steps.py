"""Decode steps with drafts: which steps have some, in which blocks, and what became of them.

A step with drafts computes 1 + k tokens of each request and yields 1 to 1 + k, so until it is
committed, blocks must be held for all of them. The keys and values of drafts that are not accepted
stay behind in these blocks, and the next steps overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.prefix_cache import PrefixReuse
from ostinato.scheduling.request import Request
from ostinato.scheduling.step_plan import ScheduledRequest


@dataclass
class SpeculationStats:
    """``num_runs``: steps with drafts, counted once for each of their requests.

    ``num_drafts`` were computed in them, and ``num_accepted`` of these were right.
    """

    num_runs: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Add a run of ``num_drafts`` drafts, of which ``num_accepted`` were accepted."""
        self.num_runs += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a request in a step with drafts: the accepted ones, and one more."""
        return 1 + self.num_accepted / self.num_runs if self.num_runs else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The fraction of drafts that were accepted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    def reset(self) -> None:
        """Start all counts at 0 again."""
        self.num_runs = self.num_drafts = self.num_accepted = 0


class DraftSteps:
    """Adds drafts to decode steps. ``num_drafts``: per request, by the number of requests.

    It may be changed between steps, to numbers that have graphs.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        num_drafts: Sequence[int],
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.num_drafts = num_drafts
        self.stats = SpeculationStats()
        self._allocator = allocator
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len

    def add_to(self, rows: list[ScheduledRequest]) -> int:
        """Extend the rows of a decode step by drafts; return how many each has.

        That is 0 if some would not fit, and a free block for each request's next step: a request
        should not be preempted for another's drafts. It is 0 too if a request is constrained: which
        tokens may follow a draft depends on the draft, which only the device knows.
        """
        num_drafts, allocator = self.num_drafts[len(rows)], self._allocator
        query_len, size = 1 + num_drafts, allocator.block_size
        if not num_drafts or query_len * len(rows) > self._max_num_batched_tokens:
            return 0
        if any(row.request.constraint is not None for row in rows):
            return 0
        ends = [row.start + row.request.num_pending_drafts + query_len for row in rows]
        if max(ends) > self._max_model_len:
            return 0
        needed = [
            max(-(-end // size) - len(row.request.block_ids), 0)
            for row, end in zip(rows, ends, strict=True)
        ]
        if sum(needed) + len(rows) > allocator.num_free_blocks:
            return 0
        for row, count in zip(rows, needed, strict=True):
            if count:
                blocks = allocator.allocate(count)
                row.request.block_ids += blocks
                row.new_blocks = [*row.new_blocks, *blocks]
            row.num_tokens = query_len
            row.request.num_pending_drafts += num_drafts
        return num_drafts

    def append(self, row: ScheduledRequest, run: Sequence[int], prefixes: PrefixReuse) -> int:
        """Append the tokens that a step yields to a request, up to one that ends it.

        Returns the last of them. Blocks of accepted tokens can be reused.
        """
        request, size = row.request, self._allocator.block_size
        num_drafts = row.num_tokens - 1
        self.stats.count(num_drafts, len(run) - 1)
        request.num_pending_tokens -= 1
        request.num_pending_drafts -= num_drafts
        start = request.num_tokens - 1
        kept = run[: _num_until_end(request, run)]
        request.output_token_ids += kept
        if row.holds_its_blocks:
            request.num_computed_tokens += len(run) - 1
            end = request.num_tokens - 1  # the last token is not in the cache yet
            if start // size != end // size:
                prefixes.publish(request, start // size, end // size)
        return kept[-1]


def _num_until_end(request: Request, run: Sequence[int]) -> int:
    """How many of these tokens the request gets, up to one that ends it."""
    run = run[: request.max_total_tokens - request.num_tokens]
    num_output, min_tokens = len(request.output_token_ids), request.params.min_tokens
    for index, token in enumerate(run, 1):
        if token in request.stop_token_ids and num_output + index >= min_tokens:
            return index
    return len(run)
