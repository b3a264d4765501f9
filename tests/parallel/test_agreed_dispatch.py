"""Ranks that step together: for any batches, all run one mode and size, or all run eagerly."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.parallel.agreed_dispatch import AgreedDispatch, AgreedStep

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
WHOLE = CUDAGraphMode.FULL_AND_FULL


class SentError(Exception):
    """Ends a rank's first pass once its message is known."""


class Rank:
    """One rank of a group: records what it sends, and returns the sum once that is known."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.sent: torch.Tensor | None = None
        self.total: torch.Tensor | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.total is None:
            self.sent = tensor
            raise SentError
        return self.total


def step_together(
    plan: CapturePlan, shapes: list[BatchShape | None], *, captured: bool = True
) -> list[AgreedStep | None]:
    """What each rank runs, each with its own dispatcher."""
    ranks = [Rank(index, len(shapes)) for index in range(len(shapes))]
    dispatchers = []
    for rank, shape in zip(ranks, shapes, strict=True):
        dispatcher = Dispatcher(plan)
        for entry in plan.entries if captured else ():
            dispatcher.mark_captured(entry)
        dispatchers.append(AgreedDispatch(rank, plan, dispatcher.dispatch))
        with pytest.raises(SentError):
            dispatchers[-1].step(shape)
    total = torch.stack([rank.sent for rank in ranks if rank.sent is not None]).sum(0)
    for rank in ranks:
        rank.total = total
    return [each.step(shape) for each, shape in zip(dispatchers, shapes, strict=True)]


def choices(plan: CapturePlan, shapes: list[BatchShape | None], **options: bool) -> list[Choice]:
    steps = step_together(plan, shapes, **options)
    return [step.choice for step in steps if step is not None]


def plan_of(mode: CUDAGraphMode, sizes: list[int], **limits: Any) -> CapturePlan:
    return CapturePlan.build(
        mode, sizes, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    )


# --- the property -------------------------------------------------------------------------------


class Group(NamedTuple):
    """A plan that all ranks have, and a batch for each of them."""

    plan: CapturePlan
    shapes: list[BatchShape | None]
    captured: bool


@st.composite
def groups(draw: st.DrawFn) -> Group:
    limit = draw(st.integers(1, 24))
    max_num_seqs = draw(st.integers(1, 10))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    max_loras = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.integers(1, limit), min_size=1, max_size=6))
    multiple = draw(st.sampled_from([1, 1, 2, 3]))
    plan = CapturePlan.without_sizes(
        draw(st.sampled_from([BOTH, BOTH, WHOLE, WHOLE, DECODE_ONLY, FULL, PIECEWISE, NONE])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=limit * multiple,
        decode_query_lens=lengths,
        max_loras=max_loras,
    )
    if plan.mode is not NONE:
        in_order = tuple(sorted({size * multiple for size in sizes}))
        own = None
        if plan.mode in (BOTH, WHOLE) and draw(st.booleans()):
            mixed = draw(st.lists(st.integers(1, limit), max_size=6))
            own = tuple(sorted({size * multiple for size in mixed}))
        plan = plan.with_sizes(in_order, mixed_sizes=own, token_multiple=multiple)

    def batch() -> BatchShape | None:
        kind = draw(st.sampled_from(["decode", "decode", "decode", "chunks", "mixed", "idle"]))
        loras = draw(st.integers(0, max_loras + 1)) if draw(st.booleans()) else 0
        blocked = draw(st.integers(0, 7)) == 0
        if kind == "idle":
            return None
        if kind == "mixed":
            tokens = draw(st.integers(1, limit))
            reqs = draw(st.integers(1, min(tokens, max_num_seqs)))
            return BatchShape(tokens, reqs, tokens - reqs + 1, loras, blocked, has_prompts=True)
        length = draw(st.sampled_from(lengths))
        reqs = draw(st.integers(1, max_num_seqs))
        return BatchShape(reqs * length, reqs, length, loras, blocked, has_prompts=kind == "chunks")

    shapes = [batch() for _ in range(draw(st.integers(1, 5)))]
    return Group(plan, shapes, captured=draw(st.integers(0, 9)) > 0)


def decodes(shape: BatchShape | None) -> bool:
    return shape is not None and not shape.has_prompts


@pytest.mark.slow
@settings(max_examples=800)
@given(groups())
def test_all_ranks_run_one_mode_and_size_that_each_has_a_graph_for(group: Group) -> None:
    plan, shapes, captured = group
    steps = step_together(plan, shapes, captured=captured)
    if all(shape is None for shape in shapes):
        assert steps == [None] * len(shapes)
        return
    ran = [step.choice for step in steps if step is not None]
    assert len(ran) == len(shapes)
    (mode,) = {choice.mode for choice in ran}
    across = {tuple(step.num_tokens_across_dp.tolist()) for step in steps if step is not None}
    assert across == {tuple(choice.padded_num_tokens for choice in ran)}
    for shape, choice in zip(shapes, ran, strict=True):
        check_fits(plan, shape, choice)
        assert choice.reason.is_eager == (mode is NONE)
        if mode is not NONE:
            assert PlanEntry(mode=mode, descriptor=choice.descriptor) in plan.entries
            assert captured
    if mode is not NONE:
        assert len({choice.padded_num_tokens for choice in ran}) == 1
        assert len({choice.descriptor.uniform for choice in ran}) == 1
    check_not_worse_than_needed(group, mode, ran)


def check_fits(plan: CapturePlan, shape: BatchShape | None, choice: Choice) -> None:
    key = choice.descriptor
    assert key.num_tokens % plan.token_multiple == 0
    if shape is None:
        assert not key.has_lora
        return
    assert key.num_tokens >= shape.num_tokens
    if choice.mode is NONE:
        loras = shape.num_active_loras
        assert key == BatchDescriptor(
            plan.padded_tokens(shape.num_tokens), has_lora=loras > 0, num_active_loras=loras
        )
        return
    case = min(case for case in plan.lora_cases if case >= shape.num_active_loras)
    assert (key.num_active_loras, key.has_lora) == (case, case > 0)
    if key.uniform:
        assert decodes(shape)
        assert plan.query_len_of(key) == shape.max_query_len
        assert key.num_reqs == key.num_tokens // shape.max_query_len >= shape.num_reqs
    elif key.num_reqs is not None:
        assert key.num_reqs >= shape.num_reqs
    assert choice.mode is not FULL or not shape.attention_blocks_full


def check_not_worse_than_needed(group: Group, mode: CUDAGraphMode, ran: list[Choice]) -> None:
    """The mode is the lowest of what each rank would run alone, unless no size of it fits all."""
    plan, shapes, captured = group
    dispatcher = Dispatcher(plan)
    for entry in plan.entries if captured else ():
        dispatcher.mark_captured(entry)
    alone = [dispatcher.dispatch(shape) for shape in shapes if shape is not None]
    least = min((choice.mode for choice in alone), key=lambda mode: mode.rank)
    assert mode.rank <= least.rank
    largest = max(shape.num_tokens for shape in shapes if shape is not None)
    if least is NONE:
        assert {Reason.EAGER_ON_ANOTHER_RANK} >= {
            choice.reason
            for choice, shape in zip(ran, shapes, strict=True)
            if shape is None or dispatcher.dispatch(shape).mode is not NONE
        }
        return
    uniform = all(choice.descriptor.uniform for choice in alone)
    common = set(plan.mixed_sizes)
    if uniform:
        lengths = {shape.max_query_len for shape in shapes if shape is not None}
        common = set.intersection(*(set(plan.decode_sizes_for(length)) for length in lengths))
    fitting = [size for size in common if size >= largest]
    if fitting:
        assert mode is least
        assert ran[0].padded_num_tokens == min(fitting)
        assert ran[0].descriptor.uniform == uniform
    elif uniform and plan.mode is not DECODE_ONLY and largest <= max(plan.mixed_sizes, default=0):
        assert mode is {BOTH: PIECEWISE, WHOLE: FULL}[plan.mode]
        assert ran[0].padded_num_tokens == min(size for size in plan.mixed_sizes if size >= largest)
    else:
        assert mode is NONE
        assert {choice.reason for choice in ran} == {Reason.NO_COMMON_SIZE}


# --- what was seen ------------------------------------------------------------------------------


def test_each_rank_keeps_its_own_adapters() -> None:
    plan = plan_of(BOTH, [2, 4, 8], max_loras=4)
    shapes = [BatchShape(1, 1, 1, 3), BatchShape(4, 4, 1, 0), BatchShape(2, 2, 1, 1), None]
    ran = choices(plan, [*shapes])
    assert [choice.descriptor.num_active_loras for choice in ran] == [4, 0, 1, 0]
    assert {(choice.mode, choice.padded_num_tokens) for choice in ran} == {(FULL, 4)}
    prompt = BatchShape(6, 1, 6, 2, has_prompts=True)
    ran = choices(plan, [*shapes, prompt])
    assert [choice.descriptor.num_active_loras for choice in ran] == [4, 0, 1, 0, 2]
    assert {(choice.mode, choice.padded_num_tokens) for choice in ran} == {(PIECEWISE, 8)}


def test_a_decode_only_size_beside_pieces_is_dispatched_again() -> None:
    # Decode batches of 3 tokens per request have size 6, which piecewise graphs lack.
    plan = plan_of(BOTH, [2, 4, 8], decode_query_lens=(3,))
    ran = choices(plan, [BatchShape(6, 2, 3), BatchShape(2, 1, 2, has_prompts=True)])
    assert [choice.descriptor for choice in ran] == [BatchDescriptor(8)] * 2
    assert ran[0].reason is Reason.PIECES_ON_ANOTHER_RANK


def test_without_pieces_large_enough_all_are_eager() -> None:
    plan = plan_of(BOTH, [2, 4], decode_query_lens=(3,))
    ran = choices(plan, [BatchShape(6, 2, 3), BatchShape(2, 1, 2, has_prompts=True), None])
    assert [choice.padded_num_tokens for choice in ran] == [6, 2, 1]
    assert {(choice.mode, choice.reason) for choice in ran} == {(NONE, Reason.NO_COMMON_SIZE)}


def test_the_size_is_that_of_the_unpadded_maximum() -> None:
    # 4 tokens are padded to 6 in decode graphs, but 4 is a piecewise size.
    plan = plan_of(BOTH, [1, 4, 6], decode_query_lens=(3,))
    ran = choices(plan, [BatchShape(3, 1, 3), BatchShape(4, 1, 4, has_prompts=True)])
    assert [choice.descriptor for choice in ran] == [BatchDescriptor(4)] * 2


def test_ranks_of_several_query_lengths_take_a_size_that_all_have() -> None:
    plan = plan_of(DECODE_ONLY, [2, 3, 6], decode_query_lens=(1, 3))
    ran = choices(plan, [BatchShape(2, 2, 1), BatchShape(3, 1, 3), None])
    assert [(choice.descriptor.num_tokens, choice.descriptor.query_len) for choice in ran] == [
        (3, 1),
        (3, 3),
        (3, 1),
    ]
    # Size 6 is unreachable for requests with one token each, of which there are at most 4.
    plan = plan_of(DECODE_ONLY, [2, 3, 6], decode_query_lens=(1, 3), max_num_seqs=4)
    ran = choices(plan, [BatchShape(2, 2, 1), BatchShape(6, 2, 3)])
    assert {(choice.mode, choice.reason) for choice in ran} == {(NONE, Reason.NO_COMMON_SIZE)}


def test_chunks_of_prompts_on_one_rank_keep_others_from_decode_graphs() -> None:
    plan = plan_of(BOTH, [4, 8], decode_query_lens=(2,))
    decode = BatchShape(4, 2, 2)
    assert {choice.mode for choice in choices(plan, [decode, decode])} == {FULL}
    chunks = decode._replace(has_prompts=True)
    assert {choice.mode for choice in choices(plan, [decode, chunks])} == {PIECEWISE}
    only = plan_of(DECODE_ONLY, [4, 8], decode_query_lens=(2,))
    assert {choice.mode for choice in choices(only, [decode, chunks])} == {NONE}


def test_decode_beside_a_prompt_runs_the_mixed_graph_of_the_same_size() -> None:
    plan = plan_of(WHOLE, [2, 4, 8], max_loras=2)
    mixed, decode = BatchDescriptor(4, num_reqs=4), BatchDescriptor(4, num_reqs=4, uniform=True)
    prompt = BatchShape(4, 1, 4, has_prompts=True)
    ran = choices(plan, [BatchShape(4, 4, 1), prompt, None])
    assert [choice.descriptor for choice in ran] == [mixed] * 3
    assert not any(choice.uniform_decode for choice in ran)
    assert [choice.reason for choice in ran] == [
        Reason.MIXED_ON_ANOTHER_RANK,
        Reason.MIXED,
        Reason.MIXED,
    ]
    ran = choices(plan, [BatchShape(4, 4, 1), BatchShape(3, 3, 1), None])
    assert [choice.descriptor for choice in ran] == [decode] * 3
    ran = choices(plan, [BatchShape(4, 4, 1, 2), prompt])
    assert [choice.descriptor.num_active_loras for choice in ran] == [2, 0]


def test_decode_batches_without_a_size_in_common_run_a_mixed_graph() -> None:
    plan = plan_of(WHOLE, [2, 3, 6], mixed_sizes=[16], decode_query_lens=(1, 3), max_num_seqs=4)
    ran = choices(plan, [BatchShape(2, 2, 1), BatchShape(6, 2, 3)])
    assert [choice.descriptor for choice in ran] == [BatchDescriptor(16, num_reqs=4)] * 2
    assert {choice.reason for choice in ran} == {Reason.MIXED_ON_ANOTHER_RANK}


def test_ranks_with_other_messages_are_told() -> None:
    rank = Rank(0, 1)
    rank.total = torch.zeros(2, dtype=torch.int64)
    plan = plan_of(BOTH, [4])
    with pytest.raises(ConfigError, match="got 2 integers from the ranks, which is not 3 for each"):
        AgreedDispatch(rank, plan, Dispatcher(plan).dispatch).step(None)
