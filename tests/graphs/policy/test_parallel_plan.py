"""Plans of the base and shift models: every batch has a graph or a reason, every graph a batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.policy.descriptor import BatchShape, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, sequence_parallel_sizes, shift_sizes

MODES = [
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.FULL_AND_FULL,
]


def test_sizes_as_in_the_contract() -> None:
    ladder = (1, 2, 4, 8, 16)
    base = sequence_parallel_sizes(ladder, sp=4, threshold=8, max_num_batched_tokens=48)
    assert base == (16, 32)  # 4 and 8 are the shift model's, 64 is more than a batch can have
    assert shift_sizes(ladder, threshold=8) == (1, 2, 4, 8)
    assert shift_sizes(ladder, threshold=9) == (1, 2, 4, 8, 16)
    assert shift_sizes(ladder, threshold=100) == ladder
    assert shift_sizes(ladder, threshold=1) == (1,)
    everything = sequence_parallel_sizes(ladder, sp=2, threshold=0, max_num_batched_tokens=48)
    assert everything == (2, 4, 8, 16, 32)


@st.composite
def pairs(draw: Any) -> tuple[CapturePlan, CapturePlan, int, int]:
    sp = draw(st.integers(2, 8))
    max_tokens = draw(st.integers(sp, 120))
    max_num_seqs = draw(st.integers(1, max_tokens))
    threshold = draw(st.integers(1, 130))
    sizes = draw(st.sets(st.integers(1, max_tokens), min_size=1, max_size=8))
    query_len = draw(st.integers(1, 3))
    whole = CapturePlan.without_sizes(
        draw(st.sampled_from(MODES)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        decode_query_lens=(query_len,),
    )
    base = whole.with_sizes(
        sequence_parallel_sizes(
            sizes, sp=sp, threshold=threshold, max_num_batched_tokens=max_tokens
        ),
        token_multiple=sp,
    )
    return base, whole.with_sizes(shift_sizes(sizes, threshold=threshold)), threshold, sp


def shapes(plan: CapturePlan) -> list[BatchShape]:
    """One batch of every number of tokens, and every uniform decode batch."""
    (query_len,) = plan.decode_query_lens
    most, max_reqs = plan.max_num_batched_tokens, plan.max_num_seqs
    mixed = [BatchShape(n, 1, max(n, query_len + 1)) for n in range(1, most + 1)]
    decode = [BatchShape(r * query_len, r, query_len) for r in range(1, max_reqs + 1)]
    return mixed + [shape for shape in decode if shape.num_tokens <= most]


@pytest.mark.slow
@settings(max_examples=300)
@given(pairs())
def test_every_batch_has_a_graph_or_a_reason_and_every_graph_a_batch(
    pair: tuple[CapturePlan, CapturePlan, int, int],
) -> None:
    base, shift, threshold, sp = pair
    dispatchers = [Dispatcher(base), Dispatcher(shift)]
    for dispatcher in dispatchers:
        for entry in dispatcher.plan.entries:
            dispatcher.mark_captured(entry)
    reached: list[set[Any]] = [set(), set()]
    for shape in shapes(base):
        small = shape.num_tokens <= threshold
        choice = dispatchers[small].dispatch(shape)
        assert choice.padded_num_tokens >= shape.num_tokens
        if not small:
            assert choice.padded_num_tokens % sp == 0
        if choice.reason.is_eager:
            assert choice.reason is Reason.TOO_LARGE
            assert choice.padded_num_tokens - shape.num_tokens < (1 if small else sp)
        else:
            reached[small].add((choice.mode, choice.descriptor))
    for number, plan in enumerate((base, shift)):
        planned = {(entry.mode, entry.descriptor) for entry in plan.entries}
        assert reached[number] <= planned
        unreached = [key for mode, key in planned - reached[number]]
        # With several tokens per request, decode batches skip over the threshold: the shift
        # model's largest decode graph may then be unreachable. Nothing else is.
        if plan is shift and plan.decode_query_lens != (1,):
            largest = max((key.num_tokens for _, key in planned if key.uniform), default=0)
            unreached = [key for key in unreached if not key.uniform or key.num_tokens < largest]
        assert not unreached


def test_sizes_that_do_not_split_are_refused() -> None:
    plan = CapturePlan.without_sizes(
        CUDAGraphMode.PIECEWISE, max_num_seqs=4, max_num_batched_tokens=16
    )
    with pytest.raises(ConfigError, match=r"sizes \[3\] are not multiples of 2"):
        plan.with_sizes((2, 3), token_multiple=2)


def test_the_multiple_is_part_of_the_digest() -> None:
    plan = CapturePlan.without_sizes(
        CUDAGraphMode.PIECEWISE, max_num_seqs=4, max_num_batched_tokens=16
    )
    digests = {plan.with_sizes((4, 8), token_multiple=n).digest for n in (1, 2, 4)}
    assert len(digests) == 3
