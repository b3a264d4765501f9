"""``ArrivalQueue``: unfinished requests in order of arrival: the first run, the others wait.

The main invariant: every running request arrived before every waiting one. Only the oldest waiting
request is admitted and only the youngest running one is preempted, so ``running`` is always in
order of arrival, and the oldest request is never preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.prefix_cache import PrefixReuse
from ostinato.scheduling.request import Request, RequestStatus
from ostinato.scheduling.step_plan import ScheduledRequest


class ArrivalQueue:
    """Gives requests blocks of ``allocator``, and the rows 0 to ``max_num_seqs`` - 1, to run.

    It decides how many tokens each computes in a step: at most ``chunk``, and within the step's
    budget. ``waiting`` (by id) and ``running`` are for reading.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        prefixes: PrefixReuse,
        *,
        max_num_seqs: int,
        max_model_len: int,
        chunk: int,
    ) -> None:
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []
        self.num_preemptions = 0  # since the start
        self._chunk = chunk
        self._allocator = allocator
        self._prefixes = prefixes
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._free_req_indices = list(range(max_num_seqs))  # a heap

    def add(self, request: Request) -> None:
        """Queue a new request behind all others."""
        self.waiting[request.request_id] = request

    def remove_waiting(self, request: Request) -> None:
        """Forget a waiting request, or one whose ``add`` was interrupted before it was queued."""
        self.waiting.pop(request.request_id, None)

    def remove_running(self, request: Request) -> None:
        """Forget a running request, and free its blocks and row."""
        self.running.remove(request)
        self._vacate(request)

    def restart(self, requests: Mapping[str, Request]) -> None:
        """Let these wait, oldest first, and no other; all rows are free. Blocks are not freed."""
        self.waiting = OrderedDict(requests)
        self.running = []
        self._free_req_indices = list(range(self._max_num_seqs))

    def extend_running(
        self, rows: list[ScheduledRequest], preempted: list[Request], budget: int
    ) -> int:
        """Schedule more tokens of the running requests, oldest first; return the remaining budget.

        The youngest are preempted if the blocks do not suffice.
        """
        index = 0
        while budget and index < len(self.running):
            request = self.running[index]
            index += 1
            total = request.num_expected_tokens
            if total >= request.max_total_tokens:
                continue  # its last token is pending
            if request.num_computed_tokens + request.num_pending_drafts >= self._max_model_len:
                continue  # it may be
            row = self._extend(request, total, budget, preempted)
            if row is None:
                break
            rows.append(row)
            budget -= row.num_tokens
        return budget

    def admit_waiting(self, rows: list[ScheduledRequest], budget: int) -> int:
        """Admit as many waiting requests as fit, oldest first; return the remaining budget."""
        blocks_for = self._allocator.blocks_for
        promised = 0  # blocks that running requests still need for the tokens they have now
        for row in rows:
            if not row.samples:
                promised += blocks_for(row.request.num_tokens) - len(row.request.block_ids)
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            request = next(iter(self.waiting.values()))
            admitted = self._admit(request, budget, promised)
            if admitted is None:
                break
            rows.append(admitted)
            budget -= admitted.num_tokens
            promised += blocks_for(request.num_tokens) - len(request.block_ids)
        return budget

    def _extend(
        self, request: Request, total: int, budget: int, preempted: list[Request]
    ) -> ScheduledRequest | None:
        """Schedule more of the ``total`` tokens of a running request; None if it was preempted."""
        start, held = request.num_computed_tokens, len(request.block_ids)
        end = total
        if total - start > 1:
            end = min(total, start + budget, start + self._chunk)
        blocks: Sequence[int] = ()
        most = end + request.num_pending_drafts
        if most > held * self._allocator.block_size:
            needed = self._allocator.blocks_for(most) - held
            while needed > self._allocator.num_free_blocks:
                youngest = self.running.pop()
                self._preempt(youngest)
                preempted.append(youngest)
                if youngest is request:
                    return None
            blocks = self._allocator.allocate(needed)
            request.block_ids += blocks
        req_index = request.req_index
        assert req_index is not None, "a running request has a row"
        times = request.num_preemptions
        return ScheduledRequest(
            request, req_index, start, end - start, blocks, held, False, end == total, times
        )

    def _admit(self, request: Request, budget: int, promised: int) -> ScheduledRequest | None:
        """Start the oldest waiting request; None if it does not fit yet.

        All its tokens must fit, not just the first chunk: otherwise long prompts would be admitted
        only to preempt one another. And no token may be pending from a step before a preemption.
        """
        if request.num_pending_tokens:
            return None
        allocator, total = self._allocator, request.num_tokens
        cached = self._prefixes.take(request)
        if allocator.blocks_for(total) - len(cached) + promised > allocator.num_free_blocks:
            allocator.release(cached)
            return None
        start = len(cached) * allocator.block_size
        num_tokens = min(total - start, budget, self._chunk)
        end = start + num_tokens
        blocks = cached + allocator.allocate(allocator.blocks_for(end) - len(cached))
        if not request.num_preemptions:
            request.num_cached_tokens = start
            allocator.stats.query_tokens += total
            allocator.stats.hit_tokens += start
        req_index = heappop(self._free_req_indices)
        request.status = RequestStatus.RUNNING
        request.req_index = req_index
        request.num_computed_tokens = start
        request.block_ids = list(blocks)
        del self.waiting[request.request_id]
        self.running.append(request)
        times = request.num_preemptions
        return ScheduledRequest(
            request, req_index, start, num_tokens, blocks, 0, True, end == total, times
        )

    def _preempt(self, request: Request) -> None:
        """Put a request removed from ``running`` at the front of the queue."""
        self._vacate(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _vacate(self, request: Request) -> None:
        """Free the blocks and the row of a request."""
        assert request.req_index is not None, "a running request has a row"
        self._allocator.release(request.block_ids)
        request.block_ids = []
        heappush(self._free_req_indices, request.req_index)
        request.req_index = None
