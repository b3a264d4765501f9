"""The graph to capture next: compared with counting every batch through the dispatcher."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.next_capture import most_wanted
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry


def plan_of(mode: str, sizes: list[int]) -> CapturePlan:
    return CapturePlan.build(
        CUDAGraphMode.parse(mode), sizes, max_num_seqs=16, max_num_batched_tokens=64
    )


@given(
    mode=st.sampled_from(["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    sizes=st.sets(st.integers(1, 64), max_size=6).map(lambda sizes: {*sizes, 9}),
    batches=st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=30),
    data=st.data(),
)
def test_no_other_graph_would_have_run_more_batches(mode, sizes, batches, data):
    plan = plan_of(mode, sorted(sizes))
    batches = [(decode and n <= 16, n) for decode, n in batches]
    dispatcher = Dispatcher(plan)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    runs: Counter[PlanEntry] = Counter()
    for decode, n in batches:
        shape = BatchShape(n, n, 1) if decode else BatchShape(n, 1, n, has_prompts=True)
        choice = dispatcher.dispatch(shape)
        runs[PlanEntry(mode=choice.mode, descriptor=choice.descriptor)] += 1
    some = st.lists(st.sampled_from(plan.entries), unique=True) if plan.entries else st.just([])
    missing = data.draw(some)
    chosen = most_wanted(plan, missing, Counter(batches))
    if not missing:
        assert chosen is None
    else:
        assert runs[chosen] == max(runs[entry] for entry in missing)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_small_ones_first_before_any_batch(mode):
    plan = plan_of(mode, [1, 4, 16])
    chosen = most_wanted(plan, plan.entries, {})
    assert chosen.descriptor.num_tokens == 1
    assert chosen.descriptor.uniform is (mode == "FULL_AND_PIECEWISE")
