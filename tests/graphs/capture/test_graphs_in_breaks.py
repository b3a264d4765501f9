"""Graphs that are captured and replayed inside the eager breaks of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    compilation_counter,
    eager_break,
    set_forward_context,
)
from ostinato.errors import CaptureError, ReplayMismatchError

PIECEWISE = CUDAGraphMode.PIECEWISE
KEY = BatchDescriptor(4)


@pytest.mark.parametrize("replays", [1, 2, 3])
def test_a_graph_is_captured_and_replayed_inside_one_break(pool: GraphPool, replays: int) -> None:
    inner = CUDAGraphWrapper(lambda x: x.mul_(3), PIECEWISE, pool=pool)

    @eager_break
    def broken(x: torch.Tensor) -> None:
        for _ in range(1 + replays):
            inner(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        broken(y)
        return y - 1

    outer = CUDAGraphWrapper(function, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.zeros(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY), compilation_counter.expect(num_cudagraph_captured=3):
        for value in range(4):
            x.fill_(value)
            expected = torch.full_like(x, (value + 1) * 3.0 ** (1 + replays) - 1)
            assert torch.equal(outer(x), expected)


def test_several_graphs_of_one_break_are_replayed_after_all_are_captured(pool: GraphPool) -> None:
    add = CUDAGraphWrapper(lambda x: x.add_(2), PIECEWISE, pool=pool)
    multiply = CUDAGraphWrapper(lambda x: x.mul_(3), PIECEWISE, pool=pool)

    @eager_break
    def broken(x: torch.Tensor) -> None:
        for graph in (add, multiply, add, multiply):
            graph(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        broken(y)
        return y - 1

    outer = CUDAGraphWrapper(function, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.zeros(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        for value in range(4):
            x.fill_(value)
            expected = ((value + 1 + 2) * 3 + 2) * 3 - 1
            assert torch.equal(outer(x), torch.full_like(x, expected))


@pytest.mark.parametrize("recorded", [True, False], ids=["recording", "replay"])
def test_a_graph_from_before_may_not_be_replayed_in_a_break(
    pool: GraphPool, recorded: bool
) -> None:
    """Its results lie where the graph around it may have put its own."""
    before = CUDAGraphWrapper(lambda x: x * 3, PIECEWISE, pool=pool)
    use = recorded

    @eager_break
    def broken(x: torch.Tensor) -> torch.Tensor:
        return before(x) if use else x * 3

    outer = CUDAGraphWrapper(lambda x: broken(x) - 1, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.ones(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        before(x)
    with set_forward_context(PIECEWISE, KEY):
        if not recorded:
            outer(x)
        use = True
        with pytest.raises(CaptureError, match="replayed in an eager break of another graph"):
            outer(x)


# --- what a break returns -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (lambda x: (x * 2, x * 3), lambda x: (x * 2,), "2 values.*1 values"),
        (lambda x: (x * 2, 5), lambda x: (x * 2, 6), "5.*6"),
        (lambda x: (x * 2, 5), lambda x: (x * 2, x * 3), "5"),
        (lambda x: x, lambda x: x * 1, "one part of its arguments.*another tensor"),
    ],
    ids=["number of values", "a value", "a tensor for a value", "not its argument"],
)
def test_a_break_that_returns_something_else_on_replay_raises(
    pool: GraphPool,
    first: Callable[[torch.Tensor], Any],
    later: Callable[[torch.Tensor], Any],
    message: str,
) -> None:
    returned = first
    broken = eager_break(lambda x: returned(x))

    def function(x: torch.Tensor) -> torch.Tensor:
        result = broken(x + 1)
        return (result[0] if isinstance(result, tuple) else result) - 1

    wrapper = CUDAGraphWrapper(function, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.ones(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        wrapper(x)
        wrapper(x)
        returned = later
        with pytest.raises(ReplayMismatchError, match=message):
            wrapper(x)
