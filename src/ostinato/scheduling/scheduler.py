"""``Scheduler``: decides which requests run in a step, with how many tokens, in which blocks.

Continuous batching, first come first served, with chunked prefill. It is bookkeeping in plain
Python: it runs nothing and owns no device memory. Each step is ``schedule``, the model, then
``commit`` (or ``rollback``, if the model failed). Further steps may be scheduled before one is
committed, since a step's start tells that a request gets a token, and only its end tells which. A
request that turns out to have ended ran one step too long; that step's token is dropped. How
many tokens a step with drafts yields is known at its end too (``draft_steps``). Who runs next, in
which row and blocks, is decided by ``ArrivalQueue``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ostinato.errors import ConfigError, SchedulingError
from ostinato.scheduling.arrival_queue import ArrivalQueue
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.draft_steps import DraftSteps
from ostinato.scheduling.prefix_cache import PrefixReuse
from ostinato.scheduling.request import FinishReason, Request, RequestStatus
from ostinato.scheduling.steady_decode import SteadyDecode
from ostinato.scheduling.step_plan import (
    IntArray,
    ScheduledRequest,
    SchedulePlan,
    StepPlan,
    TokenEvent,
)


class Scheduler:
    """Owns the allocator's blocks and the rows 0 to ``max_num_seqs`` - 1 while requests run.

    A step computes at most ``max_num_batched_tokens`` tokens, and at most
    ``long_prefill_token_threshold`` of one request. ``max_model_len`` limits every request.
    ``num_drafts``: drafts per request in a decode step, by its number of requests; empty: none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int | None = None,
        num_drafts: Sequence[int] = (),
    ) -> None:
        chunk = (
            max_num_batched_tokens
            if long_prefill_token_threshold is None
            else long_prefill_token_threshold
        )
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
            ("long_prefill_token_threshold", chunk),
        ):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        capacity = (allocator.num_blocks - 1) * allocator.block_size
        if capacity < max_model_len:
            raise ConfigError(
                f"the KV cache holds {capacity} tokens ({allocator.num_blocks - 1} blocks of "
                f"{allocator.block_size}), but a request may need max_model_len {max_model_len}; "
                "give the cache more memory or lower max_model_len"
            )
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.long_prefill_token_threshold = chunk
        self._requests: dict[str, Request] = {}  # unfinished, in order of arrival
        self._open: deque[StepPlan] = deque()  # scheduled but not committed, oldest first
        self._steady: SteadyDecode | None = None
        self._prefixes = PrefixReuse(allocator)
        self._queue = ArrivalQueue(
            allocator,
            self._prefixes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            chunk=chunk,
        )
        self.drafts = DraftSteps(
            allocator,
            num_drafts or (0,) * (max_num_seqs + 1),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queue.running)

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its row and blocks, since the start."""
        return self._queue.num_preemptions

    @property
    def num_unfinished_tokens(self) -> int:
        """The tokens of all waiting and running requests, outputs so far included."""
        return sum(request.num_tokens for request in self._requests.values())

    def add(self, request: Request) -> None:
        """Queue a new request behind all others."""
        name, prompt_len = request.request_id, len(request.prompt_token_ids)
        if name in self._requests:
            raise ConfigError(f"request id {name!r} is in use; request ids must be unique")
        if request.status is not RequestStatus.WAITING or request.block_ids:
            raise ConfigError(f"request {name!r} was used before; a request can be added only once")
        if not 0 < prompt_len < request.max_total_tokens <= self.max_model_len:
            raise ConfigError(
                f"request {name!r} has {prompt_len} prompt tokens and max_total_tokens "
                f"{request.max_total_tokens}; it needs at least one prompt token, room for one "
                f"more, and at most max_model_len {self.max_model_len} in all"
            )
        self._end_steady()
        self._requests[name] = request
        self._queue.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request and free its blocks and row.

        A request that has already ended gets the new reason: stop strings are searched only after
        ``commit`` has processed the token.
        """
        name, status = request.request_id, request.status
        if status is not RequestStatus.FINISHED and self._requests.get(name) is not request:
            raise SchedulingError(f"request {name!r} is not in this scheduler")
        self._end_steady()
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.status = RequestStatus.FINISHED
        if status is RequestStatus.FINISHED:
            return
        if status is RequestStatus.RUNNING:
            self._queue.remove_running(request)
        else:
            self._queue.remove_waiting(request)
        del self._requests[name]  # last, so that rollback() finds a request half ended

    def schedule(self) -> StepPlan:
        """Plan the next step, even if earlier ones are not committed.

        The plan is empty only if no request is unfinished, or if all remaining work depends on an
        uncommitted plan. Every plan with requests must be committed, in order.
        """
        steady = self._steady.schedule() if self._steady else None
        if steady is not None:
            self._open.append(steady)
            return steady
        self._end_steady()
        rows: list[ScheduledRequest] = []
        preempted: list[Request] = []
        queue = self._queue
        budget = queue.extend_running(rows, preempted, self.max_num_batched_tokens)
        if budget and queue.waiting and not preempted:
            budget = queue.admit_waiting(rows, budget)
        for row in rows:
            row.request.num_computed_tokens = row.start + row.num_tokens
            row.request.num_pending_tokens += row.samples
        plan = SchedulePlan.of(rows, self.max_num_batched_tokens - budget, preempted)
        if plan.is_decode and not preempted and (num_drafts := self.drafts.add_to(rows)):
            plan = SchedulePlan.with_drafts(rows, num_drafts)
        if rows:
            self._open.append(plan)
            self._begin_steady()
        return plan

    def prepare_commit(self, plan: StepPlan) -> None:
        """Do what ``commit`` needs of the plan alone, while its tokens are being computed."""
        if not plan.is_decode:
            for row in plan.requests:
                if row.holds_its_blocks:
                    stop = (row.start + row.num_tokens) // self.allocator.block_size
                    self._prefixes.hash_blocks(row.request, stop)

    def commit(self, plan: StepPlan, tokens: Sequence[int] | IntArray) -> list[TokenEvent]:
        """Apply the result of a step: one token for each request that samples, in plan order.

        Tokens of requests that ended since ``schedule`` are dropped. In the steady state only
        watched requests get events.
        """
        if plan.num_tokens and not (self._open and plan is self._open[0]):
            raise SchedulingError("this plan is not the oldest open one; commit plans in order")
        steady = self._steady if plan.num_tokens else None
        num_samples = plan.num_samples if steady is None else steady.num_reqs
        if len(tokens) != num_samples:
            raise SchedulingError(
                f"the plan samples {num_samples} tokens, but {len(tokens)} came back"
            )
        if not plan.num_tokens:
            return []
        listed = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        events = None if steady is None else steady.commit(listed)
        if plan.num_drafts:
            events = self._commit_runs(plan.requests, listed, plan.num_drafts)
        elif steady is None or events is None:
            self._end_steady()
            events = self._commit_each(plan.requests, listed)
        elif steady.completed:
            for request, index in steady.some_completed():
                self._prefixes.publish(request, index, index + 1)
        self._open.popleft()
        return events

    def _commit_each(
        self, rows: Sequence[ScheduledRequest], tokens: Sequence[int]
    ) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        block_size = self.allocator.block_size
        finished = RequestStatus.FINISHED  # looking up a member of an enum is not free
        index = -1
        for row in rows:
            request, start = row.request, row.start
            index += row.samples
            if request.status is finished:
                continue
            if row.samples and row.num_tokens == 1:
                start = request.num_tokens - 1  # the row was planned before drafts were accepted
            end = start + row.num_tokens
            if start // block_size != end // block_size and row.holds_its_blocks:
                self._prefixes.publish(request, start // block_size, end // block_size)
            if row.samples:
                token = tokens[index]
                request.num_pending_tokens -= 1
                request.output_token_ids.append(token)
                ended = (
                    token in request.stop_token_ids
                    or request.num_tokens >= request.max_total_tokens
                ) and self._end(request, token)
                events.append(TokenEvent(request, token, index, ended))
        return events

    def _commit_runs(
        self, rows: Sequence[ScheduledRequest], tokens: Sequence[int], num_drafts: int
    ) -> list[TokenEvent]:
        """Commit a step with drafts: for each row all its tokens, and how many are accepted."""
        events: list[TokenEvent] = []
        query_len, finished = 1 + num_drafts, RequestStatus.FINISHED
        for number, row in enumerate(rows):
            if row.request.status is not finished:
                first = number * (query_len + 1)
                run = tokens[first : first + tokens[first + query_len]]
                last = self.drafts.append(row, run, self._prefixes)
                ended = self._end(row.request, last)
                events.append(TokenEvent(row.request, last, number * query_len, ended))
        return events

    def _begin_steady(self) -> None:
        """Enter the steady state, if all running requests are in the same open decode steps."""
        running = self._queue.running
        if self._queue.waiting and len(running) < self.max_num_seqs:
            return
        if self.drafts.num_drafts[len(running)]:
            return  # how many tokens a step yields is not known in advance
        for plan in self._open:
            if not plan.is_decode or len(plan.requests) != len(running) or plan.num_drafts:
                return
            # Rows are in order of arrival, as the running requests are.
            for row, request in zip(plan.requests, running, strict=True):
                if row.request is not request or not row.holds_its_blocks:
                    return
        for request in running:
            if len(request.block_ids) > self.allocator.blocks_for(request.num_computed_tokens):
                return  # it has blocks left that were for drafts
        self._steady = SteadyDecode(list(running), self.allocator)

    def _end_steady(self) -> None:
        if self._steady is not None:
            self._steady.flush()
            while self._steady.completed:
                request, index = self._steady.completed.popleft()
                self._prefixes.publish(request, index, index + 1)
            self._steady = None

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests keep their blocks, and may publish later ones."""
        self._end_steady()  # publishes what is complete, which is then forgotten too
        self.allocator.reset_prefix_cache()

    def take_back(self, request: Request, num_output: int) -> None:
        """Forget all but the first ``num_output`` output tokens, and an end at one of them.

        ``rollback`` must follow: uncommitted plans may count on them.
        """
        del request.output_token_ids[num_output:]
        if request.status is RequestStatus.FINISHED:
            request.status = RequestStatus.RUNNING
            request.finish_reason = request.stop_reason = None
            self._requests[request.request_id] = request

    def rollback(self) -> None:
        """Drop all uncommitted plans; running requests go back to the queue, none is lost.

        They keep their tokens, which are computed again unless the prefix cache has them. This
        restores a consistent state even if ``schedule`` or ``commit`` was interrupted.
        """
        self._steady = None
        for name, request in list(self._requests.items()):
            request.block_ids = []
            request.req_index = None
            if request.status is RequestStatus.FINISHED:
                del self._requests[name]
                continue
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
            request.status = RequestStatus.WAITING
            request.num_computed_tokens = 0
            request.num_pending_tokens = 0
            request.num_pending_drafts = 0
        self._queue.restart(self._requests)
        self.allocator.release_all()
        self._open.clear()
        for request in list(self._requests.values()):
            if request.output_token_ids:  # commit may have stopped between token and end
                self._end(request, request.output_token_ids[-1])

    def _end(self, request: Request, token: int) -> bool:
        """End the request if the token just appended ends it; return whether it did."""
        params = request.params
        if token in request.stop_token_ids and len(request.output_token_ids) >= params.min_tokens:
            asked_for = token in params.stop_token_ids
            self.finish(request, FinishReason.STOP, token if asked_for else None)
        elif request.num_tokens >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)
        return request.status is RequestStatus.FINISHED
