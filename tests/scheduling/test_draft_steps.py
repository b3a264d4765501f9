"""The scheduler with drafts: any number of them may be accepted, and no output depends on it.

The model is simulated as in ``test_scheduler``: a position's "key" is a digest of all tokens up to
it, and the next token a function of the last digest. A step runs when it is scheduled.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import FinishReason, Request, RequestStatus
from ostinato.scheduling.scheduler import Scheduler
from ostinato.scheduling.step_plan import DecodePlan, StepPlan

VOCAB = 3


def digests(tokens: list[int]) -> list[int]:
    chain, digest = [], 1
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % (2**61 - 1)
        chain.append(digest)
    return chain


def expected(request: Request) -> tuple[list[int], FinishReason]:
    """What the request gets if it is alone, without drafts."""
    tokens = list(request.prompt_token_ids)
    while True:
        tokens.append(digests(tokens)[-1] % VOCAB)
        output = tokens[len(request.prompt_token_ids) :]
        if output[-1] in request.stop_token_ids and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) >= request.max_total_tokens:
            return output, FinishReason.LENGTH


@dataclass
class Device:
    """Knows its rows' tokens and how many are computed; plans tell it the rest."""

    scheduler: Scheduler
    accepts: random.Random
    tables: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    requests: set[Request] = field(default_factory=set)

    def run(self, plan: StepPlan) -> np.ndarray[Any, Any]:
        results: list[int] = []
        for row in plan.requests:
            index = row.req_index
            if row.is_new:
                self.requests.add(row.request)
                self.tables[index], self.tokens[index] = [], row.request.all_token_ids
                self.computed[index] = row.start
            assert not row.new_blocks or row.first_new_block == len(self.tables[index])
            self.tables[index] += row.new_blocks
            size = self.scheduler.allocator.block_size
            assert len(self.tables[index]) <= -(-self.scheduler.max_model_len // size)
            if not plan.num_drafts:
                results += self._compute(index, row.num_tokens, row.samples)
                continue
            results += self._verify(index, plan.num_drafts)
        assert len(results) == plan.num_samples
        return np.array(results, dtype=np.int64)

    def _compute(self, index: int, count: int, samples: bool) -> list[int]:
        tokens, start = self.tokens[index], self.computed[index]
        self._write(index, start, tokens[: start + count])
        self.computed[index] = start + count
        assert samples == (start + count == len(tokens))
        if not samples:
            return []
        tokens.append(self._read(index, start + count) % VOCAB)
        return tokens[-1:]

    def _verify(self, index: int, num_drafts: int) -> list[int]:
        """Some drafts are right; what is sampled behind a wrong one is garbage."""
        tokens, start = self.tokens[index], self.computed[index]
        assert len(tokens) == start + 1
        count = self.accepts.randint(1, 1 + num_drafts)
        sampled = list[int]()
        for _ in range(1 + num_drafts):
            sampled.append(digests(tokens + sampled)[-1] % VOCAB)
        drafts = [*sampled[: count - 1], *[(sampled[count - 1] + 1) % VOCAB] * num_drafts]
        self._write(index, start, tokens + drafts[:num_drafts])
        assert self._read(index, start + 1) % VOCAB == sampled[0]
        tokens += sampled[:count]
        self.computed[index] = start + count
        return [*sampled[:count], *[0] * (1 + num_drafts - count), count]

    def _write(self, index: int, start: int, tokens: list[int]) -> None:
        allocator = self.scheduler.allocator
        assert len(tokens) <= self.scheduler.max_model_len
        holders = Counter(block for request in self.requests for block in request.block_ids)
        for position, digest in enumerate(digests(tokens)[start:], start):
            place = self._place(index, position)
            block = place // allocator.block_size
            assert holders[block] == 1, "wrote to a shared block"
            assert allocator._name_of[block] is None, "wrote to a findable block"
            self.cache[place] = digest

    def _read(self, index: int, end: int) -> int:
        seen = [self.cache[self._place(index, position)] for position in range(end)]
        assert seen == digests(self.tokens[index])[:end]
        return seen[-1]

    def _place(self, index: int, position: int) -> int:
        size = self.scheduler.allocator.block_size
        block = self.tables[index][position // size]
        assert block > 0
        return block * size + position % size


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.integers(0, 5),
        "stops": st.sampled_from([(), (), (0,)]),
        "after": st.integers(0, 12),
        "aborted_after": st.none() | st.integers(1, 15),
    }
)


def make(number: int, given: dict[str, Any], max_len: int) -> Request:
    max_tokens = given["max_tokens"]
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(given["min_tokens"], max_tokens))
    return Request(
        str(number),
        given["prompt"],
        params,
        max_total_tokens=min(len(given["prompt"]) + given["max_tokens"], max_len),
        stop_token_ids=frozenset(given["stops"]),
        watched=number % 2 == 0,
    )


@pytest.mark.slow
@settings(max_examples=150)
@given(
    made=st.lists(requests, min_size=1, max_size=7),
    table=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    num_blocks=st.integers(13, 40),
    block_size=st.sampled_from([2, 3]),
    depth=st.integers(1, 3),
    failing=st.sets(st.integers(0, 25), max_size=2),
    seed=st.integers(0, 1000),
)
def test_output_does_not_depend_on_drafts(
    made: list[dict[str, Any]],
    table: list[int],
    num_blocks: int,
    block_size: int,
    depth: int,
    failing: set[int],
    seed: int,
) -> None:
    """Under preemptions, aborts and failures, with several steps in flight."""
    max_len = 24
    scheduler = Scheduler(
        BlockAllocator(num_blocks, block_size),
        max_num_seqs=4,
        max_num_batched_tokens=18,
        max_model_len=max_len,
        num_drafts=table,
    )
    device = Device(scheduler, random.Random(seed))
    arrivals = [make(number, each, max_len) for number, each in enumerate(made)]
    flight: deque[tuple[StepPlan, np.ndarray[Any, Any]]] = deque()
    aborted = set()
    for step in range(2000):
        for request, each in zip(arrivals, made, strict=True):
            if each["after"] == step:
                scheduler.add(request)
            after = each["aborted_after"]
            if after is not None and each["after"] + after == step:
                aborted.add(request)
                scheduler.abort(request.request_id)
        if step in failing and flight:
            flight.clear()
            device.tables.clear()
            scheduler.rollback()
        plan = scheduler.schedule()
        if plan.num_tokens:
            assert plan.num_tokens <= 18
            assert not (isinstance(plan, DecodePlan) and plan.num_drafts)
            flight.append((plan, device.run(plan)))
        if flight and (len(flight) >= depth or not plan.num_tokens):
            scheduler.commit(*flight.popleft())
        if step > 30 and not scheduler.has_unfinished and not flight:
            break
    else:
        raise AssertionError("a request starves")
    for request in arrivals:
        output, reason = expected(request)
        if request in aborted and request.finish_reason is FinishReason.ABORT:
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.finish_reason) == (output, reason)
        assert request.status is RequestStatus.FINISHED
    assert scheduler.allocator.num_free_blocks == num_blocks - 1
    if any(request.num_preemptions for request in arrivals):
        event("preempted")
    if scheduler.drafts.stats.num_accepted:
        event("accepted")


def test_drafts_preempt_no_request() -> None:
    """With few blocks to spare, steps go on without drafts in the end."""
    scheduler = Scheduler(
        BlockAllocator(11, 4),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=24,
        num_drafts=(0, 4, 4),
    )
    device = Device(scheduler, random.Random(0))
    params = SamplingParams(max_tokens=12)
    for name in "ab":
        scheduler.add(Request(name, [0, 1, 2, 0, 1, 2, 0, 1], params, max_total_tokens=20))
    seen = list[int]()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert not plan.preempted
        seen.append(plan.num_drafts)
        scheduler.commit(plan, device.run(plan))
    assert seen[0] == 0  # the prompts
    assert 4 in seen
    assert 0 in seen[1:]


def test_steps_in_flight_hold_blocks_for_all_their_drafts() -> None:
    scheduler = Scheduler(
        BlockAllocator(20, 4),
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=24,
        num_drafts=(0, 4),
    )
    device = Device(scheduler, random.Random(0))
    request = Request("a", [0, 1, 2], SamplingParams(max_tokens=21), max_total_tokens=24)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.commit(plan, device.run(plan))
    ends = []
    plans = []
    for _ in range(6):
        plan = scheduler.schedule()
        if not plan.num_tokens:
            break
        plans.append((plan, device.run(plan)))
        ends.append((plan.num_drafts, len(request.block_ids)))
    # At most 3, then 8, 13, 18 and 23 tokens are computed before each; at 23, one more fits.
    assert ends == [(4, 2), (4, 4), (4, 5), (4, 6), (0, 6)]
    with pytest.raises(Exception, match="oldest open one"):
        scheduler.commit(*plans[1])
    scheduler.rollback()
    assert request.num_pending_drafts == request.num_pending_tokens == 0


@pytest.mark.parametrize("alone", range(1, 8))
def test_blocks_left_by_drafts_are_used(alone: int) -> None:
    """The first request has drafts while it is alone; with two there are none, up to the end."""
    scheduler = Scheduler(
        BlockAllocator(40, 4),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=24,
        num_drafts=(0, 7, 0),
    )
    device = Device(scheduler, random.Random(1))
    params = SamplingParams(max_tokens=22)
    for step in range(80):
        if step in (0, alone):
            scheduler.add(Request(str(step), [0, 1], params, max_total_tokens=24))
        plan = scheduler.schedule()
        scheduler.commit(plan, device.run(plan))
    assert not scheduler.has_unfinished
