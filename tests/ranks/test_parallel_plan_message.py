"""Plans through messages: a runner on the other side sees the same plan."""

from __future__ import annotations

import dataclasses
import pickle
from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import CollectiveError
from ostinato.ranks.channel import Channel
from ostinato.ranks.plan_message import (
    Kind,
    PlanDecoder,
    PlanEncoder,
    ReplicaEncoder,
    decode_outputs,
    encode_outputs,
    message_of_replica,
    to_bytes,
    to_words,
)
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.request_state import RequestState
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import NO_LORA, Request
from ostinato.scheduling.scheduler import Scheduler
from ostinato.scheduling.step_plan import DecodePlan, ScheduledRequest, SchedulePlan, StepPlan

CACHE = CacheSize(num_blocks=24, block_size=4, max_model_len=48)


class Wire:
    """Delivers one channel's broadcasts to another, in order."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()
        self.sizes: list[int] = []
        self.ends = Sender(self), Receiver(self)


class Sender:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.wire.sent.append(tensor.clone())
        self.wire.sizes.append(tensor.nbytes)


class Receiver:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.wire.sent.popleft())


def seen_by_a_runner(plan: StepPlan) -> tuple[Any, ...]:
    rows = [
        (
            row.req_index,
            row.start,
            row.num_tokens,
            list(row.new_blocks),
            row.first_new_block,
            row.is_new,
            row.samples,
            row.max_seq_len,
        )
        for row in plan.requests
    ]
    counts = plan.num_tokens, plan.num_samples, plan.max_query_len, plan.num_drafts
    return plan.shape, plan.is_decode, *counts, rows


def contents(state: RequestState) -> list[torch.Tensor]:
    sampling = state.sampling
    return [
        state.token_ids,
        state.num_computed,
        state.block_table,
        sampling._floats.on_device,
        sampling._ints.on_device,
        sampling.bias_ids,
        sampling.stop_ids,
    ]


arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 16), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(arrivals, st.lists(st.integers(0, 2), min_size=5, max_size=5), st.integers(0, 1))
def test_plans_arrive_as_they_were_made(
    given: list[tuple[int, int, int, bool]], num_drafts: list[int], num_ahead: int
) -> None:
    scheduler = Scheduler(
        BlockAllocator(CACHE.num_blocks, CACHE.block_size, enable_prefix_caching=True),
        max_num_seqs=4,
        max_num_batched_tokens=18,
        max_model_len=CACHE.max_model_len,
        num_drafts=num_drafts,
    )
    open_plans: deque[StepPlan] = deque()
    wire = Wire()
    sending, receiving = (Channel(end) for end in wire.ends)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    here, there = (
        RequestState(max_num_seqs=4, cache=CACHE, device=torch.device("cpu")) for _ in range(2)
    )
    last_req_indices = kept = None
    for step in range(200):
        for number, (after, length, count, plain) in enumerate(given):
            if after == step:
                scheduler.add(request(number, length, count, plain))
        plan = scheduler.schedule()
        if not plan.num_tokens:
            if open_plans:
                commit(scheduler, open_plans.popleft(), step)
            elif step > 12:
                break
            continue
        open_plans.append(plan)
        wire.sizes.clear()
        sending.send(*encoder.encode(plan))
        arrived = decoder.decode(*receiving.receive())
        assert seen_by_a_runner(arrived) == seen_by_a_runner(plan)
        if isinstance(plan, DecodePlan):
            assert isinstance(arrived, DecodePlan)
            assert wire.sizes == [512], "a steady step is one small message"
            # A runner recognizes by identity that the rows are the previous step's.
            assert (arrived.req_indices is kept) == (plan.req_indices is last_req_indices)
            last_req_indices, kept = plan.req_indices, arrived.req_indices
        here.update(plan)
        there.update(arrived)
        for ours, theirs in zip(contents(here), contents(there), strict=True):
            assert torch.equal(ours, theirs)
        if len(open_plans) > num_ahead:
            commit(scheduler, open_plans.popleft(), step)
    assert not wire.sent


def commit(scheduler: Scheduler, plan: StepPlan, step: int) -> None:
    """With drafts, the tokens of each request are followed by how many of them count."""
    tokens = [(step * 7 + i) % 50 for i in range(plan.num_samples)]
    query_len = 1 + plan.num_drafts
    for row in range(len(plan.requests) if plan.num_drafts else 0):
        tokens[row * (query_len + 1) + query_len] = 1 + (step + row) % query_len
    scheduler.commit(plan, tokens)


def request(number: int, length: int, count: int, plain: bool) -> Request:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    if not plain:
        params = SamplingParams(
            max_tokens=count, top_p=0.9, min_tokens=1, logit_bias={3: 1.5}, stop_token_ids=[9]
        )
    return Request(
        request_id=str(number),
        prompt_token_ids=[(number * 5 + i) % 50 for i in range(length)],
        params=params,
        max_total_tokens=min(length + count, CACHE.max_model_len),
        seed=2**62 + number,
        stop_token_ids=frozenset(params.stop_token_ids),
    )


def test_a_steady_state_may_be_joined_at_any_step() -> None:
    scheduler = Scheduler(
        BlockAllocator(CACHE.num_blocks, CACHE.block_size),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=CACHE.max_model_len,
    )
    scheduler.add(request(0, 5, 20, plain=True))
    plans = []
    for _ in range(6):
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1], [7])
    decoder = PlanDecoder()
    decoder.decode(*PlanEncoder().encode(plans[0]))
    encoder = PlanEncoder()  # which has not seen the plans in between
    for plan in plans[4:]:
        assert isinstance(plan, DecodePlan)
        arrived = decoder.decode(*encoder.encode(plan))
        assert [row.start for row in arrived.requests] == [row.start for row in plan.requests]


def test_a_plan_without_the_one_before_is_refused() -> None:
    with pytest.raises(CollectiveError, match="refers to an earlier plan that did not arrive"):
        PlanDecoder().decode(Kind.DECODE_AGAIN, np.empty(0, dtype=np.int64))


def replica_plans() -> list[StepPlan]:
    """A plan with two adapters, none, and one without."""
    plans = []
    for numbers in ((0, 1), (), (2,)):
        scheduler = Scheduler(
            BlockAllocator(CACHE.num_blocks, CACHE.block_size),
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_model_len=CACHE.max_model_len,
        )
        for number in numbers:
            added = request(number, 5 + number, 20, plain=True)
            scheduler.add(dataclasses.replace(added, lora_slot=(3, 1, NO_LORA)[number]))
        plans.append(scheduler.schedule())
    return plans


def test_every_replica_finds_its_plan() -> None:
    plans = replica_plans()
    kind, words = ReplicaEncoder(3).encode(plans)
    assert kind is Kind.REPLICAS
    assert message_of_replica(words, 1)[0] is Kind.IDLE
    for replica in (0, 2):
        arrived = PlanDecoder().decode(*message_of_replica(words, replica))
        assert seen_by_a_runner(arrived) == seen_by_a_runner(plans[replica])
        assert arrived.lora_slots == plans[replica].lora_slots


def test_a_steady_state_keeps_its_adapters() -> None:
    scheduler = Scheduler(
        BlockAllocator(CACHE.num_blocks, CACHE.block_size),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=CACHE.max_model_len,
    )
    scheduler.add(dataclasses.replace(request(0, 5, 20, plain=True), lora_slot=2))
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for step in range(4):
        plan = scheduler.schedule()
        arrived = decoder.decode(*encoder.encode(plan))
        assert isinstance(arrived, DecodePlan) == (step > 1)
        assert (arrived.shape, arrived.lora_slots) == (plan.shape, [2])
        scheduler.commit(plan, [7])


@pytest.mark.parametrize(
    "words",
    [[], [1], [7, 0, 1, 5], [7, 0, 99, 0], [7, 0, 5, 0], [7, 0, 6, 0], [7, 9, 7, 0]],
    ids=str,
)
def test_a_message_without_a_replicas_plan_is_refused(words: list[int]) -> None:
    with pytest.raises(CollectiveError, match="words has no plan of replica 1"):
        message_of_replica(np.array(words, dtype=np.int64), 1)


class Exploit:
    """What unpickling can do to a process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("code",)


ran: list[str] = []


def test_a_message_runs_no_code() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        words = to_words(pickle.dumps(Exploit(), protocol))
        for kind in (Kind.STEP, Kind.DECODE, Kind.DECODE_AGAIN):
            with pytest.raises(CollectiveError):
                PlanDecoder().decode(kind, words)
    assert not ran


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9), max_size=40))
def test_words_that_are_no_plan_are_refused(numbers: list[int]) -> None:
    for kind in (Kind.STEP, Kind.DECODE, Kind.DECODE_AGAIN):
        try:
            PlanDecoder().decode(kind, np.array(numbers, dtype=np.int64))
        except CollectiveError:
            continue
        # No request is known here, so the only possible plan is empty.
        assert len(numbers) == 5 if kind is Kind.STEP else numbers[:1] == [0]


def test_a_cut_message_is_refused() -> None:
    scheduler = Scheduler(
        BlockAllocator(CACHE.num_blocks, CACHE.block_size),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=CACHE.max_model_len,
    )
    scheduler.add(request(0, 5, 20, plain=False))
    kind, words = PlanEncoder().encode(scheduler.schedule())
    assert PlanDecoder().decode(kind, words).num_tokens == 5
    for length in range(len(words)):
        with pytest.raises(CollectiveError, match=f"a message of {length} words is not a plan"):
            PlanDecoder().decode(kind, words[:length])


def test_all_sampling_parameters_arrive() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.1 + 0.2,
        top_k=3,
        top_p=1 / 3,
        min_p=5e-324,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.7976931348623157e308,
        logit_bias={7: -100, 9: 1e-300},
        seed=2**63 - 1,
        max_tokens=None,
        min_tokens=3,
        stop=["\u00fc\u4e2d", 'a"b'],
        stop_token_ids=[5, 6],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=4,
        structured_outputs={"json": {"type": "object"}, "disable_any_whitespace": True},
    )
    defaults = SamplingParams()
    assert all(getattr(params, f.name) != getattr(defaults, f.name) for f in fields(params))
    sent = dataclasses.replace(request(0, 5, 20, plain=True), params=params, block_ids=[1, 2])
    row = ScheduledRequest(sent, 0, 0, 5, [1, 2], 0, True, True, 0)
    plan = SchedulePlan(requests=[row], num_tokens=5, num_samples=1, max_query_len=5, preempted=[])
    arrived = PlanDecoder().decode(*PlanEncoder().encode(plan)).requests[0].request
    assert arrived.params == params
    assert dataclasses.replace(arrived, max_total_tokens=sent.max_total_tokens).__dict__ == vars(
        sent
    )


@given(st.lists(st.lists(st.integers(0, 2**31), max_size=5), max_size=5))
def test_outputs_to_learn_arrive(outputs: list[list[int]]) -> None:
    kind, words = encode_outputs(outputs)
    assert kind is Kind.LEARN
    assert decode_outputs(words) == outputs
    if outputs and outputs[-1]:
        with pytest.raises(CollectiveError, match="words has no outputs of requests"):
            decode_outputs(words[:-1])


@given(st.binary(max_size=100))
def test_bytes_survive_as_words(data: bytes) -> None:
    assert to_bytes(to_words(data)) == data


@pytest.mark.parametrize(("kind", "count"), [(0, 3), (99, 0), (1, -1)])
def test_messages_of_other_versions_are_refused(kind: int, count: int) -> None:
    wire = Wire()
    wire.sent.append(torch.tensor([kind, count] + [0] * 62))
    with pytest.raises(CollectiveError, match=f"of kind {kind} with {count} words from rank"):
        Channel(wire.ends[1]).receive()


def test_long_messages_take_a_second_broadcast() -> None:
    wire = Wire()
    sending, receiving = (Channel(end) for end in wire.ends)
    words = np.arange(1000, dtype=np.int64)
    sending.send(Kind.STEP, words)
    kind, got = receiving.receive()
    assert kind is Kind.STEP
    assert np.array_equal(got, words)
    assert wire.sizes == [512, 8000]
