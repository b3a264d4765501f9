"""The steady state of decoding: the same requests, step after step, in arrays.

Between two changes of membership a step differs from the one before in positions alone. Here these
are advanced for all requests at once; a request is looked at only when something happens to it: it
needs a block, completes one, or may have come to its end. Whatever changes the membership ends the
run: ``flush`` writes the numbers back to the requests, and the scheduler goes on one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from ostinato.runtime.block_allocator import BlockAllocator
from ostinato.runtime.request import Request
from ostinato.runtime.schedule_plan import DecodePlan, IntArray, TokenEvent

# Requests that began together complete their blocks together. Naming them all at once would take
# longer than a step of a small model: they are named over the steps that follow. Of 16 steps, with
# blocks of 16 tokens, half are enough.
_FEWEST_NAMED_AT_ONCE = 32
_STEPS_TO_NAME_ALL = 8


class SteadyDecode:
    """Running requests that all decode. While it lasts, their counts are here and not in them."""

    def __init__(self, requests: list[Request], allocator: BlockAllocator) -> None:
        self.requests = requests
        self._allocator = allocator
        self._slots = _integers([request.slot or 0 for request in requests])
        self._expected = _integers([request.num_expected_tokens for request in requests])
        self._known = _integers([request.num_tokens for request in requests])
        self._limits = _integers([request.max_total_tokens for request in requests])
        self._capacity = _integers([len(request.block_ids) for request in requests])
        self._capacity *= allocator.block_size
        stops = set[int]().union(*(request.stop_token_ids for request in requests))
        self._stop_ids = _integers(sorted(stops))
        self._appends = [request.output_token_ids.append for request in requests]
        self._watched = [position for position, r in enumerate(requests) if r.watched]
        self._completed: deque[tuple[Request, int]] = deque()
        self._named_at_once = max(_FEWEST_NAMED_AT_ONCE, -(-len(requests) // _STEPS_TO_NAME_ALL))

    def schedule(self) -> DecodePlan | None:
        """The next step; None if the requests must be looked at one by one."""
        if (self._expected >= self._limits).any():
            return None  # somebody's last token is on its way
        full = np.flatnonzero(self._expected > self._capacity)
        new_blocks: list[tuple[int, int, int]] = []
        if len(full):
            if len(full) > self._allocator.num_free_blocks:
                return None
            blocks = self._allocator.allocate(len(full))
            for position, block in zip(full.tolist(), blocks, strict=True):
                table = self.requests[position].block_ids
                new_blocks.append((position, len(table), block))
                table.append(block)
            self._capacity[full] += self._allocator.block_size
        starts = self._expected - 1
        self._expected += 1
        return DecodePlan(
            members=self.requests, slots=self._slots, starts=starts, new_blocks=new_blocks
        )

    def may_end(self, tokens: IntArray) -> bool:
        """Whether a request may come to its end with these tokens, one for each."""
        return bool(
            (self._known + 1 >= self._limits).any()
            or (tokens[:, None] == self._stop_ids[None, :]).any()
        )

    def commit(self, tokens: IntArray) -> list[TokenEvent]:
        """Take in one token for each request, none of which ends any: events of watched ones."""
        listed: list[int] = tokens.tolist()
        for append, token in zip(self._appends, listed, strict=True):
            append(token)
        size = self._allocator.block_size
        complete = np.flatnonzero(self._known % size == 0).tolist()
        self._completed.extend(
            (self.requests[i], int(self._known[i]) // size - 1) for i in complete
        )
        self._known += 1
        return [TokenEvent(self.requests[i], listed[i], i, False) for i in self._watched]

    def some_completed(self) -> Iterator[tuple[Request, int]]:
        """Some of the blocks completed so far, by request and index, each of them once."""
        for _ in range(min(self._named_at_once, len(self._completed))):
            yield self._completed.popleft()

    def all_completed(self) -> Iterator[tuple[Request, int]]:
        """All of the blocks completed so far that ``some_completed`` has not given out."""
        while self._completed:
            yield self._completed.popleft()

    def flush(self) -> None:
        """Write the counts back to the requests."""
        pending = (self._expected - self._known).tolist()
        for request, expected, num_pending in zip(
            self.requests, self._expected.tolist(), pending, strict=True
        ):
            request.num_computed_tokens = expected - 1
            request.num_pending_tokens = num_pending


def _integers(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
