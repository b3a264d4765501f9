"""The steady state of decoding: the same requests, step after step.

Between two changes of membership a step differs from the one before in positions alone, and these
advance for all requests at once: one count of steps says where each of them is. A request is looked
at only to give it its token, and when it needs a block or completes one, which it does at steps
known beforehand. Whatever changes the membership ends the run: ``flush`` writes the numbers back to
the requests, and the scheduler goes on one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import Request
from ostinato.scheduling.step_plan import DecodePlan, TokenEvent

# Requests that began together complete their blocks together. Naming them all at once would take
# longer than a step of a small model: they are named over the steps to their next blocks.
_FEWEST_NAMED_AT_ONCE = 8


class SteadyDecode:
    """Running requests that are all in every open plan, which are all of decode steps.

    While it lasts, their counts are here and not in them.
    """

    def __init__(self, requests: list[Request], allocator: BlockAllocator) -> None:
        self.requests = requests
        self.num_reqs = len(requests)
        self._shape = BatchShape(self.num_reqs, self.num_reqs, 1)
        self._allocator = allocator
        self._slots = np.array([request.slot for request in requests], dtype=np.int64)
        self._outputs = [request.output_token_ids for request in requests]
        self._watched = [position for position, r in enumerate(requests) if r.watched]
        self._stops = set[int]().union(*(request.stop_token_ids for request in requests))
        self._num_steps = 0  # that were scheduled here
        self._num_pending = requests[0].num_pending_tokens  # of each
        # Tokens that can be asked for until the first of them has all it may have.
        self._room = min(r.max_total_tokens - r.num_expected_tokens for r in requests)
        self._computed = [request.num_computed_tokens for request in requests]  # at the beginning
        self._starts = np.array(self._computed, dtype=np.int64)
        size = allocator.block_size
        # After n steps, those at n % size have filled their blocks.
        self._full: list[list[int]] = [[] for _ in range(size)]
        for position, computed in enumerate(self._computed):
            self._full[-computed % size].append(position)
        self.completed: deque[tuple[Request, int]] = deque()  # blocks, by request and index
        self._named_at_once = max(_FEWEST_NAMED_AT_ONCE, -(-len(requests) // size))

    def schedule(self) -> DecodePlan | None:
        """The next step; None if the requests must be looked at one by one."""
        if self._room < 1:
            return None  # somebody's last token is on its way
        allocator, step = self._allocator, self._num_steps
        full = self._full[step % allocator.block_size]
        new_blocks: list[tuple[int, int, int]] = []
        if full:
            if len(full) > allocator.num_free_blocks:
                return None
            for position, block in zip(full, allocator.allocate(len(full)), strict=True):
                table = self.requests[position].block_ids
                new_blocks.append((position, len(table), block))
                table.append(block)
        self._num_steps += 1
        self._num_pending += 1
        self._room -= 1
        return DecodePlan(
            num_tokens=self.num_reqs,
            shape=self._shape,
            members=self.requests,
            slots=self._slots,
            starts=self._starts,
            new_blocks=new_blocks,
            step=step,
        )

    def commit(self, tokens: Sequence[int]) -> list[TokenEvent] | None:
        """Take in one token for each request: events of watched ones.

        None, and nothing is taken in, if a request may come to its end with these tokens.
        """
        if self._room + self._num_pending < 2 or not self._stops.isdisjoint(tokens):
            return None
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        self._num_pending -= 1
        # The step that these tokens are of may have been scheduled before the first one here.
        size, num_done = self._allocator.block_size, self._num_steps - self._num_pending
        for position in self._full[num_done % size]:
            index = (self._computed[position] + num_done) // size - 1
            self.completed.append((self.requests[position], index))
        if not self._watched:
            return []
        return [TokenEvent(self.requests[i], tokens[i], i, False) for i in self._watched]

    def some_completed(self) -> Iterator[tuple[Request, int]]:
        """Some of the blocks ``completed`` so far, each of them once.

        Asked after each step, it never leaves more than one block of a request.
        """
        for _ in range(min(self._named_at_once, len(self.completed))):
            yield self.completed.popleft()

    def flush(self) -> None:
        """Write the counts back to the requests."""
        for request, computed in zip(self.requests, self._computed, strict=True):
            request.num_computed_tokens = computed + self._num_steps
            request.num_pending_tokens = self._num_pending
