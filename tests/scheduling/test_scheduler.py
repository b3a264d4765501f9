"""The scheduler: who runs when, and that nothing it decides shows in the tokens.

The model is simulated. A position's "key" is a digest of all tokens up to it, so a read through a
block table is right only if every block holds exactly what its request needs; the next token is a
function of the last digest. As on a device that works through a stream, a step runs when it is
scheduled, with the tokens that the device has; the host learns what came of it when it commits.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.errors import ConfigError, SchedulingError
from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling import arrival_queue, block_allocator, scheduler, steady_decode
from ostinato.scheduling.block_allocator import BlockAllocator, block_hashes, root_hash
from ostinato.scheduling.request import FinishReason, Request, RequestStatus
from ostinato.scheduling.scheduler import Scheduler
from ostinato.scheduling.step_plan import (
    DecodePlan,
    ScheduledRequest,
    SchedulePlan,
    StepPlan,
    TokenEvent,
)

VOCAB = 3  # few tokens, so that prompts often begin alike
MAX_LEN = 12
MAX_DEPTH = 3  # plans in flight
GARBAGE = -1  # what a step that failed may have left in the cache


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    max_len: int = MAX_LEN,
    eos: int | None = None,
    watched: bool = False,
    **params: Any,
) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, **params)
    stops = {*settings.stop_token_ids, *(() if eos is None else (eos,))}
    return Request(
        request_id,
        prompt,
        settings,
        max_total_tokens=min(len(prompt) + max_tokens, max_len),
        stop_token_ids=frozenset(stops),
        watched=watched,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 2,
    enable_prefix_caching: bool = True,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = MAX_LEN,
    long_prefill_token_threshold: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockAllocator(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )


def digests(tokens: list[int]) -> list[int]:
    chain, digest = [], 1
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % (2**61 - 1)
        chain.append(digest)
    return chain


def next_token(tokens: list[int]) -> int:
    return digests(tokens)[-1] % VOCAB


@lru_cache(maxsize=4096)
def hashes_of_blocks(tokens: tuple[int, ...], size: int) -> tuple[bytes, ...]:
    """The hashes of all full blocks of a sequence."""
    return tuple(block_hashes(root_hash(), tokens[: len(tokens) // size * size], size))


def ends(request: Request, output: list[int]) -> FinishReason | None:
    """Whether this output, with its last token, is complete."""
    if output[-1] in request.stop_token_ids and len(output) >= request.params.min_tokens:
        return FinishReason.STOP
    if len(request.prompt_token_ids) + len(output) >= request.max_total_tokens:
        return FinishReason.LENGTH
    return None


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """What the request gets if it is alone in the world."""
    tokens, output = list(request.prompt_token_ids), list[int]()
    while True:
        output.append(next_token(tokens + output))
        reason = ends(request, output)
        if reason is not None:
            return output, reason


def rows_of(plan: StepPlan) -> list[ScheduledRequest]:
    """The rows as they are now. The plan itself is not asked, since it may remember its answer."""
    return replace(plan).requests if isinstance(plan, DecodePlan) else plan.requests


@dataclass
class Device:
    """Rows and KV cache of a device that sees nothing but plans, and tokens with new rows only."""

    allocator: BlockAllocator
    tables: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Compute a step: what it sampled, and the places in the cache that it wrote to."""
        if isinstance(plan, DecodePlan):
            steps = self._decode_rows(plan)
        else:
            steps = [self._row(row) for row in plan.requests]
        written = []
        for req_index, start, end in steps:
            assert self.computed[req_index] == start
            chain = digests(self.tokens[req_index])
            for position in range(start, end):
                place = self._place(req_index, position)
                block = place // self.allocator.block_size
                assert self.allocator._name_of[block] is None, "wrote to a findable block"
                self.cache[place] = chain[position]
                written.append(place)
            self.computed[req_index] = end
        assert len(set(written)) == len(written), "two rows wrote to one place"
        sampled = []
        for req_index, _, end in steps:
            tokens = self.tokens[req_index]
            seen = [self.cache[self._place(req_index, position)] for position in range(end)]
            assert seen == digests(tokens)[:end]
            if end == len(tokens):
                sampled.append(seen[-1] % VOCAB)
                tokens.append(sampled[-1])
        assert len(sampled) == plan.num_samples
        return sampled, written

    def _row(self, row: ScheduledRequest) -> tuple[int, int, int]:
        req_index, end = row.req_index, row.start + row.num_tokens
        if row.is_new:
            self.tables[req_index] = []
            self.tokens[req_index] = row.request.all_token_ids
            self.computed[req_index] = row.start
        assert row.first_new_block == len(self.tables[req_index])
        self.tables[req_index] += row.new_blocks
        assert row.samples == (end == len(self.tokens[req_index]))
        return req_index, row.start, end

    def _decode_rows(self, plan: DecodePlan) -> list[tuple[int, int, int]]:
        req_indices = plan.req_indices.tolist()
        for position, index, block in plan.new_blocks:
            assert index == len(self.tables[req_indices[position]])
            self.tables[req_indices[position]].append(block)
        starts = (plan.starts + plan.step).tolist()
        return [
            (req_index, start, start + 1)
            for req_index, start in zip(req_indices, starts, strict=True)
        ]

    def fail(self, written: list[int]) -> None:
        """These places were to be written by steps that failed. Rows are as good as lost."""
        for place in written:
            self.cache[place] = GARBAGE
        self.tables.clear()
        self.tokens.clear()
        self.computed.clear()

    def _place(self, req_index: int, position: int) -> int:
        size = self.allocator.block_size
        block = self.tables[req_index][position // size]
        assert block > 0, "block 0 belongs to no request"
        return block * size + position % size


@dataclass
class InFlight:
    plan: StepPlan
    rows: list[ScheduledRequest]
    tokens: list[int]
    written: list[int]


class World:
    """A scheduler, its device, the steps in flight, and all that can be known from outside.

    Every operation checks what must hold for it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.allocator
        self.device = Device(scheduler.allocator)
        self.arrivals: list[Request] = []
        self.aborted: set[Request] = set()
        self.flight: deque[InFlight] = deque()
        self.computed: Counter[Request] = Counter()  # tokens, by steps that were started
        self.pending: Counter[Request] = Counter()  # tokens that steps in flight will give
        self.num_commits = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.arrivals.append(request)

    def abort(self, request: Request) -> None:
        was_finished = request.status is RequestStatus.FINISHED
        result = self.scheduler.abort(request.request_id)
        assert result is (None if was_finished else request)
        if not was_finished:
            self.aborted.add(request)

    def schedule(self, within: AbstractContextManager[None] | None = None) -> StepPlan:
        """Plan a step and let the device run it. Its tokens stay there until ``commit``."""
        before = self.with_status(RequestStatus.RUNNING)
        with within or nullcontext():
            plan = self.scheduler.schedule()
        rows = rows_of(plan)
        self.check_plan(plan, rows, before)
        for request in plan.preempted:
            self.computed[request] = 0
        for row in rows:
            self.computed[row.request] = row.start + row.num_tokens
            self.pending[row.request] += row.samples
        if rows:
            sampled, written = self.device.run(plan)
            self.flight.append(InFlight(plan, rows, sampled, written))
            self.check_written(written)
        self.check_counts()
        return plan

    def commit(self, within: AbstractContextManager[None] | None = None) -> list[TokenEvent]:
        """Bring the tokens of the oldest step in flight to the host."""
        step = self.flight.popleft()  # it succeeded, whatever becomes of the commit
        sampling = [row.request for row in step.rows if row.samples]
        live = [r for r in sampling if r.status is not RequestStatus.FINISHED]
        before = {row.request: list(row.request.output_token_ids) for row in step.rows}
        steady = self.scheduler._steady is not None
        self.num_commits += 1
        as_array = self.num_commits % 2 == 0
        tokens = np.array(step.tokens, dtype=np.int64) if as_array else step.tokens
        with within or nullcontext():
            if self.num_commits % 3:  # the engine always does; commit does not rely on it
                self.scheduler.prepare_commit(step.plan)
            events = self.scheduler.commit(step.plan, tokens)
        for request, token in zip(sampling, step.tokens, strict=True):
            if request in live:
                before[request].append(token)
                self.pending[request] -= 1
        for request, output in before.items():
            assert request.output_token_ids == output
            assert {type(token) for token in output} <= {int}
        for request in live:
            assert request.finish_reason is ends(request, request.output_token_ids)
        self.check_events(events, sampling, live, steady)
        self.check_counts()
        return events

    def step(self) -> tuple[StepPlan, list[TokenEvent]]:
        """One step at a time."""
        plan = self.schedule()
        return plan, self.commit() if self.flight else []

    def advance(self, depth: int) -> list[TokenEvent]:
        """Have ``depth`` steps in flight, if there is so much to do, and commit the oldest."""
        while len(self.flight) < depth and self.schedule().num_tokens:
            pass
        return self.commit() if self.flight else []

    def drain(self, depth: int = 1) -> None:
        """Run until nothing is left.

        The oldest computes a token per step at least. A step in flight may have been for nothing.
        """
        unfinished = [r for r in self.arrivals if r.status is not RequestStatus.FINISHED]
        limit = sum(request.max_total_tokens + depth for request in unfinished)
        while self.scheduler.has_unfinished:
            assert limit > 0, "a request starves"
            limit -= 1
            self.advance(depth)
            self.check_state()
        while self.flight:
            assert self.commit() == []
        assert not self.schedule().num_tokens
        assert self.allocator.num_free_blocks == self.allocator.num_blocks - 1

    def rollback(self) -> None:
        """All steps in flight failed, and what they left in the cache is unknown."""
        self.device.fail([place for step in self.flight for place in step.written])
        self.flight.clear()
        self.computed.clear()
        self.pending.clear()
        self.scheduler.rollback()
        assert self.scheduler.num_running == 0
        self.check_counts()

    # --- what must hold -------------------------------------------------------------------------

    def with_status(self, status: RequestStatus) -> list[Request]:
        return [request for request in self.arrivals if request.status is status]

    def references(self) -> Counter[int]:
        """How many requests hold each block."""
        running = self.with_status(RequestStatus.RUNNING)
        return Counter(block for request in running for block in request.block_ids)

    def expected(self, request: Request) -> int:
        return request.num_tokens + self.pending[request]

    def check_plan(
        self, plan: StepPlan, rows: list[ScheduledRequest], before: list[Request]
    ) -> None:
        """What must hold for every plan. ``before`` are the requests that ran until then."""
        unfinished = [r for r in self.arrivals if r.status is not RequestStatus.FINISHED]
        assert self.scheduler.has_unfinished == bool(unfinished)
        assert len({id(row.request) for row in rows}) == len(rows)
        kept = before[: len(before) - len(plan.preempted)]
        assert plan.preempted == before[len(kept) :][::-1], "the youngest are preempted"
        place = {request: number for number, request in enumerate(self.arrivals)}
        in_order = sorted(rows, key=lambda row: place[row.request])
        chosen = [row.request for row in in_order]
        self.check_oldest(chosen, unfinished, before)
        left = self.check_rows(in_order, before)
        # None is passed over: requests that ran go on, then those that waited longest come in.
        going = [r for r in kept if self.expected(r) < r.max_total_tokens]
        admitted = [row.request for row in in_order if row.is_new]
        old = chosen[: len(chosen) - len(admitted)]
        assert old == going[: len(old)]
        assert old == going or not left
        assert not admitted or not plan.preempted
        waited = [r for r in unfinished if r not in before]
        assert admitted == waited[: len(admitted)]
        if left and not plan.preempted and len(admitted) < len(waited):
            self.check_reason_to_wait(waited[len(admitted)])
        self.check_layout(plan, rows, self.scheduler.max_num_batched_tokens - left)

    def check_oldest(
        self, chosen: list[Request], unfinished: list[Request], before: list[Request]
    ) -> None:
        """There is progress: with nothing in flight the oldest request is in every plan."""
        if not unfinished:
            assert not chosen
            return
        oldest = unfinished[0]
        waits_for_tokens = self.pending[oldest] > 0 and (
            oldest not in before or self.expected(oldest) >= oldest.max_total_tokens
        )
        assert waits_for_tokens or chosen[0] is oldest
        assert not waits_for_tokens or self.flight

    def check_rows(self, in_order: list[ScheduledRequest], before: list[Request]) -> int:
        """Each row is as long as it can be; what is left of the budget."""
        size, chunk = self.allocator.block_size, self.scheduler.long_prefill_token_threshold
        budget = self.scheduler.max_num_batched_tokens
        for row in in_order:
            request, end = row.request, row.start + row.num_tokens
            assert row.is_new == (request not in before)
            if row.is_new:
                assert self.pending[request] == 0, "admitted without a token that is on its way"
                assert request.block_ids == list(row.new_blocks)
            else:
                assert row.start == self.computed[request]
            missing = self.expected(request) - row.start
            assert row.num_tokens == min(missing, budget, chunk)
            assert row.num_tokens >= 1
            assert row.samples == (row.num_tokens == missing)
            assert end < request.max_total_tokens
            assert row.req_index == request.req_index
            assert row.admission == request.num_preemptions
            if row.new_blocks:
                assert request.block_ids[row.first_new_block :] == list(row.new_blocks)
            assert 0 <= len(request.block_ids) * size - end < size
            budget -= row.num_tokens
        return budget

    def check_reason_to_wait(self, request: Request) -> None:
        """Budget is left, and the oldest that waits was not admitted: something else is missing."""
        running = self.with_status(RequestStatus.RUNNING)
        if len(running) == self.scheduler.max_num_seqs or self.pending[request]:
            return
        size = self.allocator.block_size
        shareable = (request.num_tokens - 1) // size
        names = hashes_of_blocks(tuple(request.all_token_ids), size)[:shareable]
        cached = self.allocator.match_prefix(names)
        free = self.allocator.num_free_blocks
        free -= len(set(cached) - set(self.references()))
        promised = sum(max(-(-r.num_tokens // size) - len(r.block_ids), 0) for r in running)
        assert -(-request.num_tokens // size) - len(cached) + promised > free

    def check_written(self, places: list[int]) -> None:
        holders = self.references()
        blocks = {place // self.allocator.block_size for place in places}
        assert all(holders[block] == 1 for block in blocks), "wrote to a shared block"

    def check_layout(self, plan: StepPlan, rows: list[ScheduledRequest], num_tokens: int) -> None:
        assert plan.num_tokens == num_tokens == sum(row.num_tokens for row in rows)
        assert plan.num_samples == sum(row.samples for row in rows)
        late = [not (row.num_tokens == 1 and row.samples) for row in rows]
        assert late == sorted(late), "decodes stand first"
        assert plan.is_decode == (bool(rows) and not any(late))
        if rows:
            # Single tokens of prompts that go on must not pass for a decode batch.
            longest = max(row.num_tokens for row in rows)
            assert plan.max_query_len == longest
            shape = BatchShape(num_tokens, len(rows), longest, has_prompts=any(late))
            assert plan.shape == shape
        for kind in (False, True):
            group = [r.request for r, flag in zip(rows, late, strict=True) if flag == kind]
            assert group == sorted(group, key=self.arrivals.index)

    def check_events(
        self,
        events: list[TokenEvent],
        sampling: list[Request],
        live: list[Request],
        steady: bool,
    ) -> None:
        heard = [event.request for event in events]
        assert heard == [r for r in live if r in heard], "in plan order, and none twice"
        for event in events:
            assert sampling[event.index] is event.request
            assert event.request.output_token_ids[-1] == event.token_id
            assert event.finished == (event.request.status is RequestStatus.FINISHED)
        for request in live:
            if not steady or request.watched or request.status is RequestStatus.FINISHED:
                assert request in heard

    def check_counts(self) -> None:
        """The requests know how far they are, unless the steady state knows it for them."""
        if self.scheduler._steady is not None:
            return
        for request in self.arrivals:
            if request.status is not RequestStatus.FINISHED:
                assert request.num_computed_tokens == self.computed[request]
                assert request.num_pending_tokens == self.pending[request]

    def check_state(self) -> None:
        """What must hold at any time."""
        running = self.with_status(RequestStatus.RUNNING)
        waiting = self.with_status(RequestStatus.WAITING)
        allocator, scheduler = self.allocator, self.scheduler
        assert allocator.num_free_blocks == allocator.num_blocks - 1 - len(self.references())
        assert (scheduler.num_running, scheduler.num_waiting) == (len(running), len(waiting))
        assert scheduler.num_running <= scheduler.max_num_seqs
        req_indices = [request.req_index for request in running]
        assert len(set(req_indices)) == len(req_indices)
        assert set(req_indices) <= set(range(scheduler.max_num_seqs))
        for request in self.arrivals:
            if request.status is not RequestStatus.RUNNING:
                assert request.req_index is None
                assert not request.block_ids
            if request.status is RequestStatus.WAITING:
                assert request.num_computed_tokens == 0
            assert (request.finish_reason is None) == (request.status is not RequestStatus.FINISHED)
        if running and waiting:
            last, first = self.arrivals.index(running[-1]), self.arrivals.index(waiting[0])
            assert last < first, "first come first served"
        self.check_sharing(running)
        self.check_names()

    def check_sharing(self, running: list[Request]) -> None:
        """A block that two requests hold is full, computed, and has the same tokens up to there."""
        size = self.allocator.block_size
        holders: dict[int, tuple[int, Request]] = {}
        for request in running:
            assert len(set(request.block_ids)) == len(request.block_ids)
            for index, block in enumerate(request.block_ids):
                if block not in holders:
                    holders[block] = index, request
                    continue
                other_index, other = holders[block]
                end = (index + 1) * size
                assert index == other_index
                assert request.all_token_ids[:end] == other.all_token_ids[:end]
                assert min(self.computed[request], self.computed[other]) >= end

    def check_names(self) -> None:
        """What can be found in the cache is there."""
        size, known = self.allocator.block_size, set()
        for request in self.arrivals:
            tokens = request.all_token_ids
            names = hashes_of_blocks(tuple(tokens), size)
            assert request.block_hashes == list(names[: len(request.block_hashes)])
            if known.issuperset(names):
                continue
            chain = digests(tokens)
            for index, name in enumerate(names):
                for block in self.allocator.match_prefix([name]):
                    places = range(block * size, (block + 1) * size)
                    content = [self.device.cache[place] for place in places]
                    assert content == chain[index * size : (index + 1) * size]
            known.update(names)
        assert known.issuperset(self.allocator._block_of), "hashed from tokens that no request has"

    def check_outputs(self) -> None:
        """All have ended as if each had been alone."""
        for request in self.arrivals:
            output, reason = expected_output(request)
            if request in self.aborted:
                assert request.finish_reason is FinishReason.ABORT
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == output
                assert request.finish_reason is reason


def make_world(**limits: Any) -> World:
    return World(make_scheduler(**limits))


@contextmanager
def interrupt_allocator(
    allocator: BlockAllocator, method: str, calls: int, before: int
) -> Iterator[None]:
    """Ctrl-C right before or after a method of the allocator is called once more."""
    original = getattr(allocator, method)
    left = [calls]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and before:
            raise KeyboardInterrupt
        result = original(*arguments)
        if left[0] < 0:
            raise KeyboardInterrupt
        return result

    setattr(allocator, method, interrupted)
    try:
        yield
    finally:
        delattr(allocator, method)


@contextmanager
def interrupt_at_line(number: int) -> Iterator[None]:
    """Ctrl-C before the line that is executed as the ``number``-th in the scheduler's modules."""
    files = {
        module.__file__ for module in (scheduler, arrival_queue, steady_decode, block_allocator)
    }
    left = [number]

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


requests_to_make = st.builds(
    lambda prompt, max_tokens, eos, stop, min_tokens, watched: {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "eos": eos,
        "stop_token_ids": stop,
        "min_tokens": min(min_tokens, max_tokens),
        "watched": watched,
    },
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 1),
    max_tokens=st.integers(1, 2 * MAX_LEN),
    eos=st.none() | st.integers(0, 2 * VOCAB),
    stop=st.lists(st.integers(0, 2 * VOCAB), max_size=1),
    min_tokens=st.integers(0, 6),
    watched=st.booleans(),
)
limits = st.builds(
    lambda block_size, spare, max_model_len, **rest: {
        "block_size": block_size,
        "num_blocks": 1 + -(-max_model_len // block_size) + spare,
        "max_model_len": max_model_len,
        **rest,
    },
    block_size=st.integers(1, 5),
    spare=st.integers(0, 8),
    max_model_len=st.sampled_from([MAX_LEN, 2 * MAX_LEN]),
    enable_prefix_caching=st.booleans(),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 20),
    long_prefill_token_threshold=st.none() | st.integers(1, 6),
)
depths = st.integers(1, MAX_DEPTH)


class SchedulerMachine(RuleBasedStateMachine):
    """A life of random arrivals, steps in flight, aborts, failures and cache resets."""

    @initialize(limits=limits, last_depth=depths, named_at_once=st.sampled_from([1, 2, 32]))
    def start(self, limits: dict[str, Any], last_depth: int, named_at_once: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(steady_decode, "_FEWEST_NAMED_AT_ONCE", named_at_once)
        self.world = make_world(**limits)
        self.last_depth = last_depth

    @rule(batch=st.lists(requests_to_make, min_size=1, max_size=4))
    def add(self, batch: list[dict[str, Any]]) -> None:
        world = self.world
        for made in batch:
            name, max_len = str(len(world.arrivals)), world.scheduler.max_model_len
            world.add(make_request(name, max_len=max_len, **made))

    @rule()
    def schedule(self) -> None:
        if len(self.world.flight) < MAX_DEPTH:
            self.world.schedule()

    @precondition(lambda self: self.world.flight)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(depth=depths, steps=st.integers(1, 8))
    def advance(self, depth: int, steps: int) -> None:
        for _ in range(steps):
            self.world.advance(depth)

    @precondition(lambda self: self.world.arrivals)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(self.world.arrivals)))

    @precondition(lambda self: self.world.flight)
    @rule()
    def fail(self) -> None:
        self.world.rollback()

    @rule(
        number=st.integers(0, 120),
        method=st.none() | st.sampled_from(["allocate", "release", "take", "publish"]),
        committing=st.booleans(),
    )
    def interrupt(self, number: int, method: str | None, committing: bool) -> None:
        world = self.world
        if method is None:
            interruption = interrupt_at_line(number)
        else:
            interruption = interrupt_allocator(world.allocator, method, number // 2 % 4, number % 2)
        try:
            if committing and world.flight:
                world.commit(interruption)
            elif not committing and len(world.flight) < MAX_DEPTH:
                world.schedule(interruption)
        except KeyboardInterrupt:
            world.rollback()

    @rule()
    def forget_prefixes(self) -> None:
        self.world.allocator.reset_prefix_cache()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check_state()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(self.last_depth)
            self.world.check_outputs()
            self.patch.undo()


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.slow
@settings(max_examples=200)
@given(limits=limits, batch=st.lists(requests_to_make, min_size=1, max_size=8), depth=depths)
def test_tokens_do_not_depend_on_scheduling(
    limits: dict[str, Any], batch: list[dict[str, Any]], depth: int
) -> None:
    """All at once and scarce blocks, some steps ahead: outputs are those of each request alone."""
    world = make_world(**limits)
    for number, made in enumerate(batch):
        world.add(make_request(str(number), max_len=limits["max_model_len"], **made))
    world.drain(depth)
    world.check_outputs()


# --- the steady state -----------------------------------------------------------------------------


def facts(plan: StepPlan) -> tuple[Any, ...]:
    """All that a plan says, with names for requests."""
    rows = [
        (
            row.request.request_id,
            row.req_index,
            row.start,
            row.num_tokens,
            list(row.new_blocks),
            row.first_new_block if row.new_blocks else None,
            row.is_new,
            row.samples,
            row.admission,
        )
        for row in rows_of(plan)
    ]
    preempted = [request.request_id for request in plan.preempted]
    return rows, preempted, plan.shape, plan.num_samples, plan.max_query_len, plan.is_decode


def state_facts(world: World) -> tuple[Any, ...]:
    """All that is to be seen between two steps, including what will be evicted in which order."""
    allocator = world.allocator
    requests = [
        (
            request.output_token_ids,
            request.status,
            request.finish_reason,
            request.stop_reason,
            request.req_index,
            request.block_ids,
            request.block_hashes,
            request.num_preemptions,
            request.num_cached_tokens,
        )
        for request in world.arrivals
    ]
    names = list(allocator._block_of.items())
    return requests, names, list(allocator._idle), allocator._free, allocator._refs


class Pair:
    """Two schedulers that get the same calls; the slow one, the reference, has no steady state."""

    def __init__(self, **limits: Any) -> None:
        self.fast, self.slow = make_world(**limits), make_world(**limits)
        self.slow.scheduler._begin_steady = lambda: None  # type: ignore[method-assign]
        self.num_decode_plans = 0

    def add(self, **made: Any) -> None:
        name = str(len(self.fast.arrivals))
        for world in (self.fast, self.slow):
            world.add(make_request(name, **made))

    def schedule(self) -> StepPlan:
        plan, other = self.fast.schedule(), self.slow.schedule()
        assert isinstance(other, SchedulePlan)
        assert facts(plan) == facts(other)
        self.num_decode_plans += isinstance(plan, DecodePlan)
        return plan

    def commit(self) -> None:
        assert self.fast.flight[0].tokens == self.slow.flight[0].tokens
        fast, slow = (
            [
                (event.request.request_id, event.token_id, event.index, event.finished)
                for event in world.commit()
                if event.request.watched or event.finished
            ]
            for world in (self.fast, self.slow)
        )
        assert fast == slow

    def advance(self, depth: int) -> None:
        while len(self.fast.flight) < depth and self.schedule().num_tokens:
            pass
        if self.fast.flight:
            self.commit()

    def compare(self) -> None:
        assert state_facts(self.fast) == state_facts(self.slow)
        self.fast.check_state()

    def drain(self, depth: int) -> None:
        while self.fast.flight or self.fast.scheduler.has_unfinished:
            self.advance(depth)
            self.compare()
        self.fast.check_outputs()


happenings = st.one_of(
    st.tuples(st.just("add"), st.lists(requests_to_make, min_size=1, max_size=3)),
    st.tuples(st.just("advance"), st.tuples(depths, st.integers(1, 12))),
    st.tuples(st.just("schedule"), st.none()),
    st.tuples(st.just("commit"), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 8)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("forget"), st.none()),
)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    limits=limits,
    batch=st.lists(requests_to_make, min_size=1, max_size=5),
    life=st.lists(happenings, max_size=15),
    depth=depths,
)
def test_the_steady_state_decides_as_the_scheduler_would_one_by_one(
    limits: dict[str, Any],
    batch: list[dict[str, Any]],
    life: list[tuple[str, Any]],
    depth: int,
) -> None:
    pair = Pair(**limits)
    worlds = (pair.fast, pair.slow)
    for what, value in [("add", batch), *life]:
        if what == "add":
            for made in value:
                pair.add(max_len=limits["max_model_len"], **made)
        elif what == "advance":
            for _ in range(value[1]):
                pair.advance(value[0])
                pair.compare()
        elif what == "schedule" and len(pair.fast.flight) < MAX_DEPTH:
            pair.schedule()
        elif what == "commit" and pair.fast.flight:
            pair.commit()
        elif what == "abort":
            for world in worlds:
                world.abort(world.arrivals[value % len(world.arrivals)])
        elif what == "fail":
            for world in worlds:
                world.rollback()
        elif what == "forget":
            for world in worlds:
                world.allocator.reset_prefix_cache()
        pair.compare()
    pair.drain(depth)


LONG = 80


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_long_decode_is_steady(depth: int, enable_prefix_caching: bool) -> None:
    pair = Pair(block_size=4, max_model_len=LONG, enable_prefix_caching=enable_prefix_caching)
    for number in range(3):
        pair.add(prompt=[number] * (3 + number), max_tokens=30, max_len=LONG, watched=number == 1)
    kinds = []
    for _ in range(25):
        pair.advance(depth)
        kinds.append(pair.fast.scheduler._steady is not None)
        pair.compare()
    assert all(kinds[2:])
    assert pair.num_decode_plans >= 22
    pair.drain(depth)


def test_what_ends_the_steady_state_and_that_it_comes_back() -> None:
    world = make_world(block_size=4, max_model_len=LONG, max_num_seqs=3, max_num_batched_tokens=8)

    def until_steady() -> None:
        for _ in range(6):
            world.advance(2)
            if all(isinstance(step.plan, DecodePlan) for step in world.flight):
                return
        raise AssertionError("the steady state does not come back")

    first, second = (make_request(n, [0] * 4, max_tokens=70, max_len=LONG) for n in "ab")
    world.add(first, second)
    until_steady()
    world.add(make_request("c", [1] * 12, max_tokens=60, max_len=LONG))  # two chunks
    assert [type(world.schedule()) for _ in range(2)] == [SchedulePlan, SchedulePlan]
    until_steady()
    # All rows are taken: one that waits is no reason to look at each of those that run.
    world.add(make_request("d", [1], max_tokens=2, max_len=LONG))
    until_steady()
    assert world.scheduler.num_waiting == 1
    world.abort(second)
    assert isinstance(world.schedule(), SchedulePlan)
    until_steady()
    world.rollback()
    assert isinstance(world.schedule(), SchedulePlan)
    until_steady()
    world.scheduler.finish(first, FinishReason.STOP, "###")
    assert isinstance(world.schedule(), SchedulePlan)
    world.aborted.add(first)
    first.finish_reason = FinishReason.ABORT
    world.drain(depth=2)
    world.check_outputs()


def test_a_stop_token_that_does_not_end_a_request_does_not_end_the_steady_state_for_long() -> None:
    for depth in (1, 2, 3):
        pair = Pair(max_model_len=LONG)
        pair.add(prompt=[0, 1], max_tokens=30, max_len=LONG, eos=0, min_tokens=30)
        pair.add(prompt=[1, 1], max_tokens=30, max_len=LONG)
        pair.drain(depth)
        assert pair.num_decode_plans >= 8


def test_in_the_steady_state_only_watched_requests_are_heard_of() -> None:
    world = make_world(max_model_len=LONG)
    for name in "abcd":
        watched = name in "bd"
        world.add(make_request(name, [0], max_tokens=20, max_len=LONG, watched=watched))
    assert [(e.request.request_id, e.index) for e in world.advance(1)] == [("b", 1), ("d", 3)]
    for _ in range(18):
        events = world.advance(2)
        assert [(e.request.request_id, e.index) for e in events] == [("b", 1), ("d", 3)]
    assert [e.request.request_id for e in world.advance(2)] == [*"abcd"]
    assert not world.scheduler.has_unfinished


def test_blocks_completed_together_are_named_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steady_decode, "_FEWEST_NAMED_AT_ONCE", 2)
    world = make_world(
        block_size=4, max_model_len=LONG, max_num_seqs=6, max_num_batched_tokens=20, num_blocks=200
    )
    requests = [
        make_request(str(n), [n % VOCAB, n // VOCAB, 0, 0], max_tokens=40, max_len=LONG)
        for n in range(5)
    ]
    world.add(*requests)
    named = []
    for _ in range(8):
        world.step()
        named.append(len(world.allocator._block_of))
    assert world.scheduler._steady is not None
    # Prompts are published when they are computed; then 5 blocks are complete after every 4 steps.
    assert named == [5, 5, 5, 5, 7, 9, 10, 10]
    for _ in range(2):
        world.step()
    assert len(world.allocator._block_of) == 14, "one is still to be named"
    # A request comes that could use it: it can be found.
    world.add(
        make_request("late", [*requests[4].all_token_ids[:12], 0], max_tokens=1, max_len=LONG)
    )
    assert len(world.allocator._block_of) == 15
    world.step()
    assert world.arrivals[-1].num_cached_tokens == 12
    world.drain()
    world.check_outputs()


def test_many_blocks_completed_together_are_named_until_the_next_are() -> None:
    world = make_world(
        block_size=2, max_model_len=LONG, max_num_seqs=20, max_num_batched_tokens=40, num_blocks=500
    )
    world.add(*(make_request(str(n), [n, 0], max_tokens=30, max_len=LONG) for n in range(20)))
    named = [0]
    for _ in range(9):
        world.step()
        named.append(len(world.allocator._block_of))
    # 20 blocks are complete after every 2 steps, and half of them are named in each.
    assert np.diff(named).tolist() == [20, 0, 10, 10, 10, 10, 10, 10, 10]
    world.drain()
    world.check_outputs()


def test_plans_of_the_steady_state_share_what_does_not_change() -> None:
    world = make_world(block_size=2, max_model_len=LONG)
    world.add(*(make_request(name, [0], max_tokens=20, max_len=LONG) for name in "ab"))
    world.schedule()
    plans = [plan for plan in (world.schedule() for _ in range(3)) if isinstance(plan, DecodePlan)]
    assert len(plans) == 3
    for plan in plans:
        assert plan.members is plans[0].members
        assert plan.req_indices is plans[0].req_indices
        assert plan.starts is plans[0].starts
    assert plans[0].starts.tolist() == [1, 1]
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert [[row.start for row in plan.requests] for plan in plans] == [[1, 1], [2, 2], [3, 3]]
    assert [len(plan.new_blocks) for plan in plans] == [0, 2, 0]


# --- steps in flight ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_that_is_seen_late_leaks_nothing(depth: int) -> None:
    """The device went on; no request gets those tokens, and they are not found in the cache."""
    prompt = [0, 1, 1]
    free, _ = expected_output(make_request("x", prompt, max_tokens=9))
    stop = free[3]
    while stop in free[:3]:
        prompt.append(0)
        free, _ = expected_output(make_request("x", prompt, max_tokens=9))
        stop = free[3]
    world = make_world(block_size=1)
    request = make_request("a", prompt, max_tokens=9, eos=stop, watched=True)
    other = make_request("b", [1, 0], max_tokens=9)
    world.add(request, other)
    heard = []
    while request.status is not RequestStatus.FINISHED:
        for event in world.advance(depth):
            if event.request is request:
                heard.append((event.token_id, event.finished))
    late = [step for step in world.flight if any(r.request is request for r in step.rows)]
    assert len(late) == depth - 1
    assert heard == [(token, token == stop) for token in free[:4]]
    world.drain(depth)
    assert request.output_token_ids == free[:4]
    assert request.finish_reason is FinishReason.STOP
    # The stop token itself was never needed, nor was what came after it.
    names = hashes_of_blocks(tuple(prompt + free), 1)
    assert len(world.allocator.match_prefix(names)) == len(prompt) + 3


@pytest.mark.parametrize("depth", [2, 3])
def test_the_last_token_is_not_computed(depth: int) -> None:
    """That a request ends for its length is known before its tokens are."""
    world = make_world()
    request, other = make_request("a", [0], max_tokens=2), make_request("b", [0], max_tokens=6)
    world.add(request, other)
    plans = [world.schedule() for _ in range(depth)]
    plans += [world.schedule()]
    rows = [[row.request.request_id for row in rows_of(plan)] for plan in plans]
    assert rows == [["a", "b"], ["a", "b"], *[["b"]] * (depth - 1)]
    world.drain()
    world.check_outputs()


def test_nothing_to_do_before_the_next_commit() -> None:
    world = make_world()
    world.add(make_request("a", [0], max_tokens=1))
    world.schedule()
    plan = world.schedule()
    assert (plan.num_tokens, plan.requests, plan.is_decode) == (0, [], False)
    assert world.scheduler.commit(plan, []) == []
    world.drain()  # commits the step that is in flight


def test_an_empty_plan_may_be_committed_at_any_time() -> None:
    world = make_world()
    empty = world.schedule()
    world.add(make_request("a", [0], max_tokens=6), make_request("b", [0], max_tokens=6))
    assert isinstance((world.schedule(), world.schedule())[1], DecodePlan)
    assert world.scheduler.commit(empty, []) == []
    assert isinstance(world.schedule(), DecodePlan)
    world.drain(depth=3)
    world.check_outputs()


def test_a_preempted_request_waits_for_the_token_it_is_owed() -> None:
    world = make_world(block_size=1, num_blocks=13, enable_prefix_caching=False)
    old, young = (make_request(name, [0, 1, 2, 0, 1], max_tokens=7) for name in "ab")
    world.add(old, young)
    world.schedule()
    world.schedule()  # all twelve blocks are held now
    plan = world.schedule()
    assert plan.preempted == [young]
    assert (young.num_pending_tokens, young.num_computed_tokens) == (2, 0)
    world.abort(old)
    assert world.schedule().num_tokens == 0  # there is room, but what would it compute?
    world.commit()
    assert world.schedule().num_tokens == 0
    world.commit()
    assert row_facts(world.schedule()) == [("b", 0, 7, True)]
    world.drain(depth=2)
    world.check_outputs()


def test_a_preempted_request_may_end_while_it_waits() -> None:
    world = make_world(block_size=1, num_blocks=13, enable_prefix_caching=False)
    old, young = make_request("a", [0] * 5, max_tokens=7), make_request("b", [0] * 6, max_tokens=1)
    world.add(old, young)
    world.schedule()
    world.schedule()
    assert world.schedule().preempted == [young]
    events = world.commit()
    assert [(e.request, e.finished) for e in events] == [(old, False), (young, True)]
    world.check_state()
    world.drain(depth=2)
    world.check_outputs()


def test_a_chunk_computed_before_a_preemption_is_published_by_nobody() -> None:
    """The request runs again, in other blocks, when the result of its old ones arrives."""
    world = make_world(block_size=2, num_blocks=7, long_prefill_token_threshold=4)
    old, other = make_request("a", [0, 0], max_tokens=8), make_request("b", [0, 1], max_tokens=8)
    young = make_request("c", [1, 1, 0, 0, 1, 1])
    world.add(old, other, young)
    first = world.schedule()
    assert row_facts(first)[2] == ("c", 0, 4, False)
    second = world.schedule()
    assert second.preempted == [young]
    world.abort(other)
    third = world.schedule()
    assert row_facts(third)[1] == ("c", 0, 4, False)
    assert young.status is RequestStatus.RUNNING
    assert (rows_of(first)[2].admission, rows_of(third)[1].admission) == (0, 1)
    world.commit()
    names = hashes_of_blocks(tuple(young.prompt_token_ids), 2)
    assert world.allocator.match_prefix(names) == []
    world.rollback()  # and now the steps fail that were to fill the new blocks
    world.check_state()
    world.drain()
    world.check_outputs()


def test_plans_are_committed_once_and_in_order() -> None:
    world = make_world()
    request = make_request("a", [0], max_tokens=6)
    world.add(request)
    scheduler = world.scheduler
    first, second, third = world.schedule(), world.schedule(), world.schedule()
    assert isinstance(third, DecodePlan)
    tokens = [step.tokens for step in world.flight]
    before = list(request.output_token_ids)
    for plan in (second, third, replace(first)):
        with pytest.raises(SchedulingError, match="not the oldest open one; commit plans in order"):
            scheduler.commit(plan, [0])
    with pytest.raises(SchedulingError, match="samples 1 tokens, but 2 came back"):
        scheduler.commit(first, [0, 0])
    with pytest.raises(SchedulingError, match="samples 1 tokens, but 0 came back"):
        scheduler.commit(first, np.array([], dtype=np.int64))
    assert request.output_token_ids == before
    scheduler.commit(first, tokens[0])
    with pytest.raises(SchedulingError, match="commit plans in order"):
        scheduler.commit(first, tokens[0])
    scheduler.commit(second, tokens[1])
    scheduler.rollback()
    for plan in (second, third):
        with pytest.raises(SchedulingError, match="commit plans in order"):
            scheduler.commit(plan, [0])
    plan = scheduler.schedule()
    with pytest.raises(SchedulingError, match="commit plans in order"):
        scheduler.commit(third, tokens[2])
    scheduler.commit(plan, tokens[2])
    assert request.output_token_ids == [tokens[0][0], tokens[1][0], tokens[2][0]]


def test_an_abort_in_flight_frees_what_later_plans_may_use() -> None:
    world = make_world(block_size=2, num_blocks=7, max_num_seqs=1)
    ended, follower = make_request("a", [0] * 8), make_request("b", [1] * 8)
    world.add(ended, follower)
    first = world.schedule()
    world.schedule()
    blocks = list(ended.block_ids)
    world.abort(ended)
    plan = world.schedule()
    assert [row.request for row in plan.requests] == [follower]
    assert plan.requests[0].req_index == first.requests[0].req_index
    assert set(blocks) & set(follower.block_ids)
    assert world.commit() == []
    assert world.commit() == []
    assert world.allocator.match_prefix(hashes_of_blocks((0,) * 8, 2)) == []
    assert ended.output_token_ids == []
    world.drain(depth=2)
    world.check_outputs()


def test_what_was_forgotten_stays_forgotten() -> None:
    """A request that goes on names the blocks that it completes from then on, and no others."""
    for num_steps, done in ((1, 1), (5, 4)):  # in the middle of the prompt, and steady
        world = make_world(block_size=2, long_prefill_token_threshold=2)
        request = make_request("a", [0] * 6, max_tokens=6)
        world.add(request)
        for _ in range(num_steps):
            world.step()
        assert (world.scheduler._steady is not None) == (num_steps == 5)
        world.allocator.reset_prefix_cache()
        while request.num_tokens < 11:
            world.step()
        names = hashes_of_blocks(tuple(request.all_token_ids), 2)
        found = [bool(world.allocator.match_prefix([name])) for name in names]
        assert found == [index >= done for index in range(5)]


# --- interruptions --------------------------------------------------------------------------------


def interrupted_life(operation: str, moment: int, number: int) -> bool:
    """Interrupt an operation at a line, go on, and end well. False if there is no such line."""
    world = make_world(block_size=2, num_blocks=8, long_prefill_token_threshold=3, max_num_seqs=3)
    stop = expected_output(make_request("x", [0, 1, 1], max_tokens=9))[0][2]
    world.add(
        make_request("a", [0, 1, 1], max_tokens=9, eos=stop, min_tokens=2, watched=True),
        make_request("b", [0, 1, 0, 0], max_tokens=3),
        make_request("c", [0, 1, 0, 0, 1], max_tokens=6),
        make_request("d", [1], max_tokens=1),
    )
    for _ in range(moment):
        world.advance(2)
    try:
        if operation == "schedule":
            world.schedule(interrupt_at_line(number))
        elif world.flight:
            world.commit(interrupt_at_line(number))
    except KeyboardInterrupt:
        world.rollback()
        world.check_state()
        world.drain(depth=2)
        world.check_outputs()
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["schedule", "commit"])
def test_an_interruption_at_any_line_loses_nothing(operation: str) -> None:
    """Wherever it strikes: a token is there or it is not, and a request has ended or goes on."""
    for moment in range(14):
        number = 0
        while interrupted_life(operation, moment, number):
            number += 1


def test_a_block_whose_naming_was_interrupted_is_named_in_the_steady_state() -> None:
    """Its hash is known by then, so hashes do not tell which block comes next."""
    world = make_world(block_size=1)
    request = make_request("a", [0, 1])
    world.add(request)
    world.schedule()
    with pytest.raises(KeyboardInterrupt):
        world.commit(interrupt_allocator(world.allocator, "publish", calls=1, before=True))
    world.rollback()
    assert len(request.block_hashes) == 2
    assert row_facts(world.schedule()) == [("a", 1, 1, True)]
    assert world.scheduler._steady is not None
    world.commit()
    assert len(world.allocator.match_prefix(hashes_of_blocks((0, 1), 1))) == 2
    world.drain(depth=2)
    world.check_outputs()


# --- what is decided ------------------------------------------------------------------------------


def row_facts(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in rows_of(plan)]


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    world = make_world(max_num_batched_tokens=6)
    world.add(make_request("a", [0] * 8))
    world.add(make_request("b", [1] * 3))
    world.add(make_request("c", [0]))
    plan, events = world.step()
    assert row_facts(plan) == [("a", 0, 6, False)]
    assert events == []
    plan, events = world.step()
    assert row_facts(plan) == [("c", 0, 1, True), ("a", 6, 2, True), ("b", 0, 3, True)]
    assert [(e.request.request_id, e.index) for e in events] == [("c", 0), ("a", 1), ("b", 2)]
    plan, _ = world.step()
    assert row_facts(plan) == [("a", 8, 1, True), ("b", 3, 1, True), ("c", 1, 1, True)]
    assert plan.shape == BatchShape(3, 3, 1)


def test_the_chunk_leaves_budget_for_others() -> None:
    world = make_world(max_num_batched_tokens=6, long_prefill_token_threshold=4)
    for name in "ab":
        world.add(make_request(name, [0] * 8))
    assert row_facts(world.schedule()) == [("a", 0, 4, False), ("b", 0, 2, False)]


def test_request_rows_are_the_lowest_free_ones() -> None:
    world = make_world(max_num_seqs=3)
    requests = [make_request(name, [0, 1]) for name in "abcde"]
    for request in requests:
        world.add(request)
    world.step()
    assert [request.req_index for request in requests] == [0, 1, 2, None, None]
    world.abort(requests[2])
    world.abort(requests[0])
    world.step()
    assert [request.req_index for request in requests] == [None, 1, None, 0, 2]


def test_a_prefix_is_found_but_never_the_whole_sequence() -> None:
    world = make_world(block_size=2)
    first = make_request("a", [0, 1, 2, 0], max_tokens=1)
    world.add(first)
    world.step()
    assert (first.status, first.num_cached_tokens) == (RequestStatus.FINISHED, 0)
    same, longer = make_request("b", [0, 1, 2, 0]), make_request("c", [0, 1, 2, 0, 1])
    world.add(same)
    world.add(longer)
    plan, _ = world.step()
    assert row_facts(plan) == [("c", 4, 1, True), ("b", 2, 2, True)]
    assert (same.num_cached_tokens, longer.num_cached_tokens) == (2, 4)
    stats = world.allocator.stats
    assert (stats.query_tokens, stats.hit_tokens) == (4 + 4 + 5, 2 + 4)


def test_a_prompt_is_hashed_while_its_step_runs() -> None:
    world = make_world(block_size=1, num_blocks=128, max_num_batched_tokens=64, max_model_len=80)
    request = make_request("a", [0] * 60, max_len=80)
    world.add(request)
    plan = world.scheduler.schedule()
    assert len(request.block_hashes) < 20, "the first block is not cached, so none is"
    world.scheduler.prepare_commit(plan)
    assert request.block_hashes == list(hashes_of_blocks((0,) * 60, 1))
    world.scheduler.commit(plan, [1])
    assert len(world.allocator.match_prefix(request.block_hashes)) == 60


def test_generated_tokens_are_found_too() -> None:
    world = make_world(block_size=2)
    first = make_request("a", [0, 1, 2], max_tokens=4)
    world.add(first)
    while world.scheduler.has_unfinished:
        world.step()
    # Seven tokens, of which the last was never computed: three full blocks.
    again = make_request("b", [*first.all_token_ids, 1])
    world.add(again)
    world.step()
    assert again.num_cached_tokens == 6


def test_without_prefix_reuse_nothing_is_hashed() -> None:
    world = make_world(enable_prefix_caching=False)
    for name in "ab":
        request = make_request(name, [0, 1, 2, 0, 1])
        world.add(request)
        while world.scheduler.has_unfinished:
            world.step()
        assert request.num_cached_tokens == 0
        assert request.block_hashes == []


def test_preemption_takes_the_youngest_and_it_comes_back_first() -> None:
    world = make_world(block_size=1, num_blocks=13, enable_prefix_caching=False, max_num_seqs=3)
    requests = [make_request(name, [0, 1, 2], max_tokens=8) for name in "abc"]
    for request in requests:
        world.add(request)
    late = make_request("d", [1])
    world.add(late)
    world.step()
    world.step()  # all twelve blocks are held now
    plan, _ = world.step()
    a, _, c = requests
    assert plan.preempted == [c]
    assert row_facts(plan) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert (c.status, c.num_preemptions, c.req_index) == (RequestStatus.WAITING, 1, None)
    assert len(c.output_token_ids) == 2
    admitted = []
    while world.scheduler.has_unfinished:
        plan, _ = world.step()
        admitted += [row.request for row in plan.requests if row.is_new]
    assert admitted.index(c) < admitted.index(late)
    assert a.num_preemptions == 0
    world.check_outputs()


def test_a_request_may_preempt_itself_but_nobody_older() -> None:
    world = make_world(
        block_size=1, num_blocks=13, enable_prefix_caching=False, long_prefill_token_threshold=5
    )
    old, young = make_request("a", [0] * 4, max_tokens=8), make_request("b", [0] * 6)
    world.add(old)
    world.add(young)
    while not young.num_preemptions:
        plan, _ = world.step()
    assert plan.preempted == [young]
    assert row_facts(plan)[0][0] == "a"
    assert old.num_preemptions == 0
    world.drain()


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    world = make_world(
        block_size=2, num_blocks=8, long_prefill_token_threshold=2, enable_prefix_caching=False
    )
    first, second = make_request("a", [0] * 8, max_tokens=1), make_request("b", [1] * 8)
    world.add(first)
    world.add(second)
    while first.status is not RequestStatus.FINISHED:
        world.step()  # four of seven blocks: one is held, three are spoken for
        assert second.status is RequestStatus.WAITING
    world.step()
    assert second.status is RequestStatus.RUNNING
    assert first.num_preemptions == second.num_preemptions == 0


def test_ends() -> None:
    prompt = [0, 1]
    tokens, _ = expected_output(make_request("x", prompt, max_tokens=8))
    first = tokens[0]
    repeated = tokens.index(first, 1) + 1  # when it is generated for the second time
    cases = {
        "eos": (make_request("eos", prompt, eos=first), 1, FinishReason.STOP, None),
        "id": (
            make_request("id", prompt, stop_token_ids=[first]),
            1,
            FinishReason.STOP,
            first,
        ),
        "later": (
            make_request("later", prompt, max_tokens=8, eos=first, min_tokens=2),
            repeated,
            FinishReason.STOP,
            None,
        ),
        "length": (make_request("length", prompt, max_tokens=3), 3, FinishReason.LENGTH, None),
        "last": (make_request("last", prompt, max_tokens=1, eos=first), 1, FinishReason.STOP, None),
        "full": (
            make_request("full", [0] * (MAX_LEN - 1), max_tokens=9),
            1,
            FinishReason.LENGTH,
            None,
        ),
    }
    world = make_world(max_num_seqs=8, max_num_batched_tokens=64)
    for request, *_ in cases.values():
        world.add(request)
    while world.scheduler.has_unfinished:
        world.step()
    for request, length, reason, stop_reason in cases.values():
        assert len(request.output_token_ids) == length, request.request_id
        assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_the_engine_ends_requests_for_stop_strings() -> None:
    world = make_world()
    running, ended = make_request("a", [0, 1]), make_request("b", [0, 1], max_tokens=1)
    world.add(running)
    world.add(ended)
    world.step()
    assert ended.finish_reason is FinishReason.LENGTH
    for request in (running, ended):
        world.scheduler.finish(request, FinishReason.STOP, "###")
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "###")
        assert request.status is RequestStatus.FINISHED
    world.check_state()
    assert not world.scheduler.has_unfinished
    stranger = make_request("a", [0])
    with pytest.raises(SchedulingError, match="'a' is not in this scheduler"):
        world.scheduler.finish(stranger, FinishReason.STOP)
    assert stranger.finish_reason is None


def test_abort_of_waiting_running_and_unknown_requests() -> None:
    world = make_world(max_num_seqs=1)
    running, waiting = make_request("a", [0, 1]), make_request("b", [0, 1])
    world.add(running)
    world.add(waiting)
    world.schedule()
    assert world.scheduler.abort("a") is running
    assert world.scheduler.abort("b") is waiting
    assert world.scheduler.abort("a") is None
    assert world.commit() == []
    assert running.output_token_ids == []
    assert running.finish_reason is FinishReason.ABORT
    assert not world.scheduler.has_unfinished
    world.check_state()


def test_a_request_is_aborted_wherever_its_addition_was_interrupted() -> None:
    line = 0
    while True:
        scheduler, request = make_scheduler(), make_request("a", [0, 1])
        try:
            with interrupt_at_line(line):
                scheduler.add(request)
            break
        except KeyboardInterrupt:
            pass
        assert scheduler.abort("a") in (request, None)
        assert (scheduler.has_unfinished, scheduler.num_waiting) == (False, 0)
        line += 1
    assert line > 5
    assert (scheduler.has_unfinished, scheduler.num_waiting) == (True, 1)


def test_rollback_loses_nothing_and_reuses_what_was_computed() -> None:
    world = make_world(block_size=2)
    request = make_request("a", [0, 1, 2, 0])
    world.add(request)
    world.step()
    world.schedule()
    world.schedule()
    world.rollback()
    world.check_state()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 1)
    assert (request.num_computed_tokens, len(request.output_token_ids)) == (0, 1)
    plan, _ = world.step()
    assert row_facts(plan) == [("a", 4, 1, True)]
    assert plan.requests[0].is_new
    assert request.num_cached_tokens == 0, "what it found at its first admission"
    world.drain()
    world.check_outputs()


def test_rollback_drops_a_request_whose_end_was_interrupted() -> None:
    world = make_world()
    ended, other = make_request("a", [0, 1]), make_request("b", [0, 1])
    world.add(ended)
    world.add(other)
    world.step()
    ended.finish_reason = FinishReason.STOP
    ended.status = RequestStatus.FINISHED  # what finish() does first
    world.rollback()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 1)
    assert [row.request for row in world.schedule().requests] == [other]


def test_a_plan_does_not_change_afterwards() -> None:
    world = make_world(block_size=1)
    world.add(make_request("a", [0, 1]))
    plan, _ = world.step()
    blocks = list(plan.requests[0].new_blocks)
    world.step()
    assert plan.requests[0].new_blocks == blocks


def test_an_empty_plan_needs_no_commit() -> None:
    world = make_world()
    plan = world.schedule()
    assert world.schedule().requests == []
    assert world.scheduler.commit(plan, []) == []


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"holds 10 tokens \(5 blocks of 2\), .* max_model_len 12"
    ):
        make_scheduler(num_blocks=6, block_size=2)
    make_scheduler(num_blocks=7, block_size=2)


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_limits_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .* got {value!r}"):
        make_scheduler(**{name: value})


def test_bad_requests_are_refused() -> None:
    world = make_world()
    world.add(make_request("a", [0]))
    with pytest.raises(ConfigError, match="request id 'a' is in use"):
        world.add(make_request("a", [0]))
    with pytest.raises(ConfigError, match=f"{MAX_LEN} prompt tokens and max_total_tokens"):
        world.add(make_request("b", [0] * MAX_LEN))
    with pytest.raises(ConfigError, match="has 0 prompt tokens"):
        world.add(make_request("b", []))
    long = make_request("b", [0])
    long.max_total_tokens = MAX_LEN + 1
    with pytest.raises(ConfigError, match=f"{MAX_LEN + 1}; .* at most max_model_len {MAX_LEN}"):
        world.add(long)
    finished = make_request("b", [0])
    finished.status = RequestStatus.FINISHED
    with pytest.raises(ConfigError, match="'b' was used before"):
        world.add(finished)
    assert world.scheduler.num_waiting == 1
