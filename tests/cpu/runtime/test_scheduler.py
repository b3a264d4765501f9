"""The scheduler: who runs when, and that nothing it decides shows in the tokens.

The model is simulated. A position's "key" is a digest of all tokens up to it, so a read through a
block table is right only if every block holds exactly what its request needs; the next token is a
function of the last digest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.errors import ConfigError, SchedulingError
from ostinato.graphs.descriptor import BatchShape
from ostinato.runtime.block_allocator import BlockAllocator
from ostinato.runtime.request import FinishReason, Request, RequestStatus
from ostinato.runtime.sampling_params import SamplingParams
from ostinato.runtime.schedule_plan import SchedulePlan, TokenEvent
from ostinato.runtime.scheduler import Scheduler

VOCAB = 3  # few tokens, so that prompts often begin alike
MAX_LEN = 12


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    eos: int | None = None,
    **params: Any,
) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, **params)
    stops = {*settings.stop_token_ids, *(() if eos is None else (eos,))}
    return Request(
        request_id,
        prompt,
        settings,
        max_total_tokens=min(len(prompt) + max_tokens, MAX_LEN),
        stop_token_ids=frozenset(stops),
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 2,
    prefix_reuse: bool = True,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    prefill_chunk: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockAllocator(num_blocks, block_size, prefix_reuse=prefix_reuse),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_LEN,
        prefill_chunk=prefill_chunk,
    )


def digests(tokens: list[int]) -> list[int]:
    chain, digest = [], 1
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % (2**61 - 1)
        chain.append(digest)
    return chain


def next_token(tokens: list[int]) -> int:
    return digests(tokens)[-1] % VOCAB


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """What the request gets if it is alone in the world."""
    tokens, output = list(request.prompt_token_ids), []
    while True:
        output.append(next_token(tokens + output))
        if output[-1] in request.stop_token_ids and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) + len(output) >= request.max_total_tokens:
            return output, FinishReason.LENGTH


@dataclass
class Device:
    """Rows and KV cache of a device that sees nothing but plans."""

    scheduler: Scheduler
    tables: dict[int, list[int]] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)

    def run(self, plan: SchedulePlan) -> list[int]:
        """Compute a step: update rows, write all keys, read all keys, sample."""
        for row in plan.requests:
            table = [] if row.is_new else self.tables[row.slot]
            assert row.first_new_block == len(table)
            self.tables[row.slot] = [*table, *row.new_blocks]
            for position in range(row.start, row.start + row.num_tokens):
                place = self._place(row.slot, position)
                block = place // self.scheduler.allocator.block_size
                assert self.scheduler.allocator.ref_count(block) == 1, "wrote to a shared block"
                self.cache[place] = digests(row.request.all_token_ids)[position]
        tokens = []
        for row in plan.requests:
            end = row.start + row.num_tokens
            seen = [self.cache[self._place(row.slot, position)] for position in range(end)]
            assert seen == digests(row.request.all_token_ids)[:end]
            if row.samples:
                tokens.append(seen[-1] % VOCAB)
        return tokens

    def _place(self, slot: int, position: int) -> int:
        size = self.scheduler.allocator.block_size
        block = self.tables[slot][position // size]
        assert block > 0, "block 0 is nobody's"
        return block * size + position % size


def check_plan(
    scheduler: Scheduler, plan: SchedulePlan, arrivals: list[Request], chunk: int | None
) -> None:
    """What must hold for every plan. ``arrivals`` are all requests ever, in order."""
    rows = plan.requests
    place = {id(request): number for number, request in enumerate(arrivals)}
    unfinished = [r for r in arrivals if r.status is not RequestStatus.FINISHED]
    assert bool(rows) == bool(unfinished) == scheduler.has_unfinished
    if not rows:
        assert plan.shape == BatchShape(0, 0, 0)
        return
    budget = scheduler.max_num_batched_tokens
    in_order = sorted(rows, key=lambda row: place[id(row.request)])
    assert in_order[0].request is unfinished[0], "the oldest makes progress"
    for row in in_order:
        request = row.request
        left = request.num_tokens - request.num_computed_tokens
        assert row.start == request.num_computed_tokens
        assert row.num_tokens == min(left, budget, chunk or budget)
        assert row.num_tokens >= 1
        assert row.samples == (row.num_tokens == left)
        assert row.slot == request.slot
        first = row.first_new_block
        assert request.block_ids[first:] == list(row.new_blocks)
        held = len(request.block_ids) * scheduler.allocator.block_size
        assert 0 <= held - (row.start + row.num_tokens) < scheduler.allocator.block_size
        budget -= row.num_tokens
    assert plan.shape == BatchShape(
        scheduler.max_num_batched_tokens - budget, len(rows), max(row.num_tokens for row in rows)
    )
    assert plan.num_samples == sum(row.samples for row in rows)
    late = [not (row.num_tokens == 1 and row.samples) for row in rows]
    assert late == sorted(late), "decodes stand first"
    for kind in (False, True):
        group = [place[id(r.request)] for r, flag in zip(rows, late, strict=True) if flag == kind]
        assert group == sorted(group)
    if plan.preempted:
        assert not any(row.is_new for row in rows)
        youngest = max(place[id(row.request)] for row in rows)
        assert all(place[id(request)] > youngest for request in plan.preempted)


def check_state(scheduler: Scheduler, arrivals: list[Request]) -> None:
    """What must hold at any time."""
    running = [r for r in arrivals if r.status is RequestStatus.RUNNING]
    waiting = [r for r in arrivals if r.status is RequestStatus.WAITING]
    allocator = scheduler.allocator
    refs = Counter(block for request in running for block in request.block_ids)
    for block in range(1, allocator.num_blocks):
        assert allocator.ref_count(block) == refs[block]
    assert allocator.num_free_blocks == allocator.num_blocks - 1 - len(refs)
    assert (scheduler.num_running, scheduler.num_waiting) == (len(running), len(waiting))
    assert scheduler.num_running <= scheduler.max_num_seqs
    slots = [request.slot for request in running]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(scheduler.max_num_seqs))
    for request in arrivals:
        if request.status is not RequestStatus.RUNNING:
            assert request.slot is None
            assert not request.block_ids
        if request.status is RequestStatus.WAITING:
            assert request.num_computed_tokens == 0
    if running and waiting:
        assert arrivals.index(running[-1]) < arrivals.index(waiting[0]), "first come first served"
    check_sharing(allocator.block_size, running)


def check_sharing(size: int, running: list[Request]) -> None:
    """A block that two requests hold is full, computed, and has the same tokens up to its end."""
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
            assert min(request.num_computed_tokens, other.num_computed_tokens) >= end


def drain(scheduler: Scheduler, device: Device, arrivals: list[Request], chunk: int | None) -> None:
    """Run until nothing is left. The oldest gains a token per step, which limits the steps."""
    limit = sum(r.max_total_tokens for r in arrivals if r.status is not RequestStatus.FINISHED)
    while scheduler.has_unfinished:
        assert limit > 0, "a request starves"
        limit -= 1
        plan = scheduler.schedule()
        check_plan(scheduler, plan, arrivals, chunk)
        scheduler.commit(plan, device.run(plan))
        check_state(scheduler, arrivals)
    check_plan(scheduler, scheduler.schedule(), arrivals, chunk)
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks - 1


def check_output(request: Request) -> None:
    output, reason = expected_output(request)
    assert request.output_token_ids == output
    assert request.finish_reason is reason


requests_to_make = st.builds(
    lambda prompt, max_tokens, eos, stop, min_tokens: {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "eos": eos,
        "stop_token_ids": stop,
        "min_tokens": min(min_tokens, max_tokens),
    },
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 1),
    max_tokens=st.integers(1, MAX_LEN),
    eos=st.none() | st.integers(0, VOCAB - 1),
    stop=st.lists(st.integers(0, VOCAB - 1), max_size=1),
    min_tokens=st.integers(0, 6),
)
limits = st.builds(
    lambda block_size, spare, **rest: {
        "block_size": block_size,
        "num_blocks": 1 + -(-MAX_LEN // block_size) + spare,
        **rest,
    },
    block_size=st.integers(1, 5),
    spare=st.integers(0, 8),
    prefix_reuse=st.booleans(),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 20),
    prefill_chunk=st.none() | st.integers(1, 6),
)


class SchedulerMachine(RuleBasedStateMachine):
    """A life of random arrivals, steps, aborts, failures and cache resets."""

    @initialize(limits=limits)
    def start(self, limits: dict[str, Any]) -> None:
        self.chunk = limits["prefill_chunk"]
        self.scheduler = make_scheduler(**limits)
        self.device = Device(self.scheduler)
        self.arrivals: list[Request] = []
        self.aborted: set[str] = set()

    @rule(made=requests_to_make)
    def add(self, made: dict[str, Any]) -> None:
        request = make_request(str(len(self.arrivals)), **made)
        self.arrivals.append(request)
        self.scheduler.add(request)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.plan()
            self.check_events(plan, self.scheduler.commit(plan, self.device.run(plan)))

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(data)

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def abort_during_a_step(self, data: st.DataObject) -> None:
        plan = self.plan()
        tokens = self.device.run(plan)
        for _ in range(data.draw(st.integers(1, 2))):
            self.abort_one(data)
        self.check_events(plan, self.scheduler.commit(plan, tokens))

    @rule(computed=st.booleans())
    def fail_a_step(self, computed: bool) -> None:
        plan = self.plan()
        if computed:
            self.device.run(plan)
        self.scheduler.rollback(plan)
        assert self.scheduler.num_running == 0 or not plan.requests

    @rule(
        calls=st.integers(0, 3),
        method=st.sampled_from(["allocate", "release", "take", "publish"]),
        before=st.booleans(),
    )
    def interrupt_the_scheduler(self, calls: int, method: str, before: bool) -> None:
        allocator, original = self.scheduler.allocator, getattr(BlockAllocator, method)
        left = [calls]

        def interrupted(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and before:
                raise KeyboardInterrupt
            result = original(allocator, *arguments)
            if left[0] < 0:
                raise KeyboardInterrupt
            return result

        setattr(allocator, method, interrupted)
        try:
            plan = self.scheduler.schedule()
            self.scheduler.commit(plan, self.device.run(plan))
        except KeyboardInterrupt:
            delattr(allocator, method)
            self.scheduler.rollback()
            assert self.scheduler.num_running == 0
        else:
            delattr(allocator, method)

    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.allocator.reset_prefix_cache()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            check_state(self.scheduler, self.arrivals)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        drain(self.scheduler, self.device, self.arrivals, self.chunk)
        for request in self.arrivals:
            output, _ = expected_output(request)
            if request.request_id in self.aborted:
                assert request.finish_reason is FinishReason.ABORT
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                check_output(request)

    def plan(self) -> SchedulePlan:
        before = {id(r): r for r in self.arrivals if r.status is RequestStatus.RUNNING}
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan, self.arrivals, self.chunk)
        for row in plan.requests:
            assert row.is_new == (id(row.request) not in before)
        assert all(id(request) in before for request in plan.preempted)
        return plan

    def check_events(self, plan: SchedulePlan, events: list[TokenEvent]) -> None:
        sampling = [row.request for row in plan.requests if row.samples]
        aborted = self.aborted
        assert [e.request for e in events] == [r for r in sampling if r.request_id not in aborted]
        for event in events:
            assert sampling[event.index] is event.request
            assert event.request.output_token_ids[-1] == event.token_id
            assert event.finished == (event.request.status is RequestStatus.FINISHED)
        for row in plan.requests:
            if row.request.status is RequestStatus.RUNNING:
                assert row.request.num_computed_tokens == row.start + row.num_tokens

    def abort_one(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.arrivals))
        was_finished = request.status is RequestStatus.FINISHED
        result = self.scheduler.abort(request.request_id)
        assert result is (None if was_finished else request)
        if not was_finished:
            self.aborted.add(request.request_id)
            check_state(self.scheduler, self.arrivals)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=40)


@settings(max_examples=200)
@given(limits=limits, batch=st.lists(requests_to_make, min_size=1, max_size=8))
def test_tokens_do_not_depend_on_scheduling(
    limits: dict[str, Any], batch: list[dict[str, Any]]
) -> None:
    """All at once and scarce blocks: outputs are those of each request alone."""
    scheduler = make_scheduler(**limits)
    requests = [make_request(str(number), **made) for number, made in enumerate(batch)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, Device(scheduler), requests, limits["prefill_chunk"])
    for request in requests:
        check_output(request)


def run_step(scheduler: Scheduler, device: Device) -> tuple[SchedulePlan, list[TokenEvent]]:
    plan = scheduler.schedule()
    return plan, scheduler.commit(plan, device.run(plan))


def row_facts(plan: SchedulePlan) -> list[tuple[str, int, int, bool]]:
    return [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in plan.requests]


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    device = Device(scheduler)
    scheduler.add(make_request("a", [0] * 8))
    scheduler.add(make_request("b", [1] * 3))
    scheduler.add(make_request("c", [0]))
    plan, events = run_step(scheduler, device)
    assert row_facts(plan) == [("a", 0, 6, False)]
    assert events == []
    plan, events = run_step(scheduler, device)
    assert row_facts(plan) == [("c", 0, 1, True), ("a", 6, 2, True), ("b", 0, 3, True)]
    assert [(e.request.request_id, e.index) for e in events] == [("c", 0), ("a", 1), ("b", 2)]
    plan, _ = run_step(scheduler, device)
    assert row_facts(plan) == [("a", 8, 1, True), ("b", 3, 1, True), ("c", 1, 1, True)]
    assert plan.shape == BatchShape(3, 3, 1)


def test_the_chunk_leaves_budget_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, prefill_chunk=4)
    for name in "ab":
        scheduler.add(make_request(name, [0] * 8))
    assert row_facts(scheduler.schedule()) == [("a", 0, 4, False), ("b", 0, 2, False)]


def test_slots_are_the_lowest_free_ones() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    device = Device(scheduler)
    requests = [make_request(name, [0, 1]) for name in "abcde"]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler, device)
    assert [request.slot for request in requests] == [0, 1, 2, None, None]
    scheduler.abort("c")
    scheduler.abort("a")
    run_step(scheduler, device)
    assert [request.slot for request in requests] == [None, 1, None, 0, 2]


def test_a_prefix_is_found_but_never_the_whole_sequence() -> None:
    scheduler = make_scheduler(block_size=2)
    device = Device(scheduler)
    first = make_request("a", [0, 1, 2, 0], max_tokens=1)
    scheduler.add(first)
    run_step(scheduler, device)
    assert (first.status, first.num_cached_tokens) == (RequestStatus.FINISHED, 0)
    same, longer = make_request("b", [0, 1, 2, 0]), make_request("c", [0, 1, 2, 0, 1])
    scheduler.add(same)
    scheduler.add(longer)
    plan, _ = run_step(scheduler, device)
    assert row_facts(plan) == [("c", 4, 1, True), ("b", 2, 2, True)]
    assert (same.num_cached_tokens, longer.num_cached_tokens) == (2, 4)
    stats = scheduler.allocator.stats
    assert (stats.query_tokens, stats.hit_tokens) == (4 + 4 + 5, 2 + 4)


def test_generated_tokens_are_found_too() -> None:
    scheduler = make_scheduler(block_size=2)
    device = Device(scheduler)
    first = make_request("a", [0, 1, 2], max_tokens=4)
    scheduler.add(first)
    while scheduler.has_unfinished:
        run_step(scheduler, device)
    # Seven tokens, of which the last was never computed: three full blocks.
    again = make_request("b", [*first.all_token_ids, 1])
    scheduler.add(again)
    run_step(scheduler, device)
    assert again.num_cached_tokens == 6


def test_without_prefix_reuse_nothing_is_hashed() -> None:
    scheduler = make_scheduler(prefix_reuse=False)
    device = Device(scheduler)
    for name in "ab":
        request = make_request(name, [0, 1, 2, 0, 1])
        scheduler.add(request)
        while scheduler.has_unfinished:
            run_step(scheduler, device)
        assert request.num_cached_tokens == 0
        assert request.block_hashes == []


def test_preemption_takes_the_youngest_and_it_comes_back_first() -> None:
    scheduler = make_scheduler(block_size=1, num_blocks=13, prefix_reuse=False, max_num_seqs=3)
    device = Device(scheduler)
    requests = [make_request(name, [0, 1, 2], max_tokens=8) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    late = make_request("d", [1])
    scheduler.add(late)
    run_step(scheduler, device)
    run_step(scheduler, device)  # all twelve blocks are held now
    plan, _ = run_step(scheduler, device)
    a, b, c = requests
    assert plan.preempted == [c]
    assert row_facts(plan) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert (c.status, c.num_preemptions, c.slot) == (RequestStatus.WAITING, 1, None)
    assert len(c.output_token_ids) == 2
    admitted = []
    while scheduler.has_unfinished:
        plan, _ = run_step(scheduler, device)
        admitted += [row.request for row in plan.requests if row.is_new]
    assert admitted.index(c) < admitted.index(late)
    assert a.num_preemptions == 0
    for request in (a, b, c, late):
        check_output(request)


def test_a_request_may_preempt_itself_but_nobody_older() -> None:
    scheduler = make_scheduler(block_size=1, num_blocks=13, prefix_reuse=False, prefill_chunk=5)
    device = Device(scheduler)
    old, young = make_request("a", [0] * 4, max_tokens=8), make_request("b", [0] * 6)
    scheduler.add(old)
    scheduler.add(young)
    while not young.num_preemptions:
        plan, _ = run_step(scheduler, device)
    assert plan.preempted == [young]
    assert row_facts(plan)[0][0] == "a"
    assert old.num_preemptions == 0
    drain(scheduler, device, [old, young], 5)


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    scheduler = make_scheduler(block_size=2, num_blocks=8, prefill_chunk=2, prefix_reuse=False)
    device = Device(scheduler)
    first, second = make_request("a", [0] * 8, max_tokens=1), make_request("b", [1] * 8)
    scheduler.add(first)
    scheduler.add(second)
    while first.status is not RequestStatus.FINISHED:
        run_step(scheduler, device)  # four of seven blocks: one is held, three are spoken for
        assert second.status is RequestStatus.WAITING
    run_step(scheduler, device)
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
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64)
    device = Device(scheduler)
    for request, *_ in cases.values():
        scheduler.add(request)
    while scheduler.has_unfinished:
        run_step(scheduler, device)
    for request, length, reason, stop_reason in cases.values():
        assert len(request.output_token_ids) == length, request.request_id
        assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_the_engine_ends_requests_for_stop_strings() -> None:
    scheduler = make_scheduler()
    device = Device(scheduler)
    running, ended = make_request("a", [0, 1]), make_request("b", [0, 1], max_tokens=1)
    scheduler.add(running)
    scheduler.add(ended)
    run_step(scheduler, device)
    assert ended.finish_reason is FinishReason.LENGTH
    for request in (running, ended):
        scheduler.finish(request, FinishReason.STOP, "###")
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "###")
        assert request.status is RequestStatus.FINISHED
    check_state(scheduler, [running, ended])
    assert not scheduler.has_unfinished
    stranger = make_request("a", [0])
    with pytest.raises(SchedulingError, match="'a' is not in this scheduler"):
        scheduler.finish(stranger, FinishReason.STOP)
    assert stranger.finish_reason is None


def test_abort_of_waiting_running_and_unknown_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_request("a", [0, 1]), make_request("b", [0, 1])
    scheduler.add(running)
    scheduler.add(waiting)
    plan = scheduler.schedule()
    assert scheduler.abort("a") is running
    assert scheduler.abort("b") is waiting
    assert scheduler.abort("a") is None
    assert scheduler.commit(plan, [2]) == []
    assert running.output_token_ids == []
    assert running.finish_reason is FinishReason.ABORT
    assert not scheduler.has_unfinished
    check_state(scheduler, [running, waiting])


def test_rollback_loses_nothing_and_reuses_what_was_computed() -> None:
    scheduler = make_scheduler(block_size=2)
    device = Device(scheduler)
    request = make_request("a", [0, 1, 2, 0])
    scheduler.add(request)
    run_step(scheduler, device)
    plan = scheduler.schedule()
    scheduler.rollback(plan)
    check_state(scheduler, [request])
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert (request.num_computed_tokens, len(request.output_token_ids)) == (0, 1)
    plan, _ = run_step(scheduler, device)
    assert row_facts(plan) == [("a", 4, 1, True)]
    assert plan.requests[0].is_new
    assert request.num_cached_tokens == 0, "what it found at its first admission"
    scheduler.rollback(plan)  # it was committed: nothing to undo
    assert scheduler.num_running == 1
    drain(scheduler, device, [request], None)
    check_output(request)


def test_rollback_drops_a_request_whose_end_was_interrupted() -> None:
    scheduler = make_scheduler()
    ended, other = make_request("a", [0, 1]), make_request("b", [0, 1])
    scheduler.add(ended)
    scheduler.add(other)
    run_step(scheduler, Device(scheduler))
    ended.status = RequestStatus.FINISHED  # what finish() does first
    scheduler.rollback()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert [row.request for row in scheduler.schedule().requests] == [other]


def test_a_plan_does_not_change_afterwards() -> None:
    scheduler = make_scheduler(block_size=1)
    device = Device(scheduler)
    scheduler.add(make_request("a", [0, 1]))
    plan, _ = run_step(scheduler, device)
    blocks = list(plan.requests[0].new_blocks)
    run_step(scheduler, device)
    assert plan.requests[0].new_blocks == blocks


def test_plans_are_committed_once_and_in_turn() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [0, 1]))
    plan = scheduler.schedule()
    with pytest.raises(SchedulingError, match="neither committed nor rolled back"):
        scheduler.schedule()
    with pytest.raises(SchedulingError, match="samples 1 tokens, but 2 came back"):
        scheduler.commit(plan, [0, 0])
    with pytest.raises(SchedulingError, match="not the last one"):
        scheduler.commit(replace(plan), [0])
    scheduler.commit(plan, [0])
    with pytest.raises(SchedulingError, match="no longer open"):
        scheduler.commit(plan, [0])


def test_an_empty_plan_needs_no_commit() -> None:
    scheduler = make_scheduler()
    plan = scheduler.schedule()
    assert scheduler.schedule().requests == []
    assert scheduler.commit(plan, []) == []


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"holds 10 tokens \(5 blocks of 2\), .* max_model_len 12"
    ):
        make_scheduler(num_blocks=6, block_size=2)
    make_scheduler(num_blocks=7, block_size=2)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_limits_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .* got {value!r}"):
        make_scheduler(**{name: value})


def test_bad_requests_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [0]))
    with pytest.raises(ConfigError, match="'a' is already there"):
        scheduler.add(make_request("a", [0]))
    with pytest.raises(ConfigError, match=f"{MAX_LEN} prompt tokens and max_total_tokens"):
        scheduler.add(make_request("b", [0] * MAX_LEN))
    with pytest.raises(ConfigError, match="has 0 prompt tokens"):
        scheduler.add(make_request("b", []))
    long = make_request("b", [0])
    long.max_total_tokens = MAX_LEN + 1
    with pytest.raises(ConfigError, match=f"{MAX_LEN + 1}; .* at most max_model_len {MAX_LEN}"):
        scheduler.add(long)
    finished = make_request("b", [0])
    finished.status = RequestStatus.FINISHED
    with pytest.raises(ConfigError, match="'b' was used before"):
        scheduler.add(finished)
    assert scheduler.num_waiting == 1
