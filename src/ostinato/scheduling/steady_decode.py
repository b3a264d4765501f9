"""The steady state of decoding: the same requests, step after step.

While the same requests run, a step differs from the previous one only in positions, which all
advance by one: a single step count gives the position of each request. A request is touched only
to append its token, and when it needs or completes a block, which happens at steps known in
advance. Any change of membership ends the run: ``flush`` writes the counts back to the requests,
and the scheduler handles them one by one again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import Request, num_active_loras
from ostinato.scheduling.step_plan import DecodePlan, TokenEvent

# Requests that start together complete their blocks together. Hashing all of them at once would
# take longer than a step of a small model, so it is spread over the steps until their next blocks.
_FEWEST_NAMED_AT_ONCE = 8


class SteadyDecode:
    """Running requests that are all in every open plan, where every plan is a decode step.

    While it lasts, it holds the counts of its requests.
    """

    def __init__(self, requests: list[Request], allocator: BlockAllocator) -> None:
        self.requests = requests
        self.num_reqs = len(requests)
        num_loras = num_active_loras(request.lora_slot for request in requests)
        self._shape = BatchShape(self.num_reqs, self.num_reqs, 1, num_loras)
        self._allocator = allocator
        self._req_indices = np.array([request.req_index for request in requests], dtype=np.int64)
        self._outputs = [request.output_token_ids for request in requests]
        self._watched = [position for position, r in enumerate(requests) if r.watched]
        self._stops = set[int]().union(*(request.stop_token_ids for request in requests))
        self._num_steps = 0  # scheduled here
        self._num_pending = requests[0].num_pending_tokens  # equal for all
        # Tokens until the first request reaches its limit.
        self._room = min(r.max_total_tokens - r.num_expected_tokens for r in requests)
        self._computed = [request.num_computed_tokens for request in requests]  # at the start
        self._starts = np.array(self._computed, dtype=np.int64)
        size = allocator.block_size
        # After n steps, the requests at n % size have filled their blocks.
        self._full: list[list[int]] = [[] for _ in range(size)]
        for position, computed in enumerate(self._computed):
            self._full[-computed % size].append(position)
        self.completed: deque[tuple[Request, int]] = deque()  # blocks, by request and index
        self._named_at_once = max(_FEWEST_NAMED_AT_ONCE, -(-len(requests) // size))

    def schedule(self) -> DecodePlan | None:
        """Plan the next step; None if the requests must be scheduled one by one."""
        if self._room < 1:
            return None  # the last token of a request is pending
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
            req_indices=self._req_indices,
            starts=self._starts,
            new_blocks=new_blocks,
            step=step,
        )

    def commit(self, tokens: Sequence[int]) -> list[TokenEvent] | None:
        """Append one token to each request; return events of the watched ones.

        Returns None and appends nothing if a request may end with these tokens.
        """
        if self._room + self._num_pending < 2 or not self._stops.isdisjoint(tokens):
            return None
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        self._num_pending -= 1
        # The step of these tokens may have been scheduled before the steady state began.
        size, num_done = self._allocator.block_size, self._num_steps - self._num_pending
        for position in self._full[num_done % size]:
            index = (self._computed[position] + num_done) // size - 1
            self.completed.append((self.requests[position], index))
        if not self._watched:
            return []
        return [TokenEvent(self.requests[i], tokens[i], i, False) for i in self._watched]

    def some_completed(self) -> Iterator[tuple[Request, int]]:
        """Pop some of the blocks ``completed`` so far.

        Called after each step, it leaves at most one block per request.
        """
        for _ in range(min(self._named_at_once, len(self.completed))):
            yield self.completed.popleft()

    def flush(self) -> None:
        """Write the counts back to the requests."""
        for request, computed in zip(self.requests, self._computed, strict=True):
            request.num_computed_tokens = computed + self._num_steps
            request.num_pending_tokens = self._num_pending
