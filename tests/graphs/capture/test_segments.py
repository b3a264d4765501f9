"""Segments: one forward captured around eager breaks, replayed as a tape."""

from __future__ import annotations

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
from ostinato.errors import ReplayMismatchError

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
KEY = BatchDescriptor(4)

calls: list[int] = []


@eager_break
def host_scale(x: torch.Tensor) -> torch.Tensor:
    """Reads a value on the host: legal between segments only."""
    calls.append(x.data_ptr())
    return x * (2.0 if x.sum().item() > 0 else 3.0)


@eager_break
def write_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(0))


def refill(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(torch.randn_like(x))


def segmented(function, pool: GraphPool, mode: CUDAGraphMode = PIECEWISE):
    return CUDAGraphWrapper(function, mode, pool=pool, split_at_breaks=True)


def check_replays(function, pool: GraphPool, graphs: int, shape=(4, 3)) -> CUDAGraphWrapper:
    """Capture, count the graphs, and compare several replays with eager."""
    wrapper = segmented(function, pool)
    x = torch.randn(*shape, device=pool.device)
    with set_forward_context(PIECEWISE, KEY), torch.no_grad():
        with compilation_counter.expect(num_cudagraph_captured=graphs):
            assert torch.equal(wrapper(x), function(x))
        for _ in range(6):
            refill(x)
            assert torch.equal(wrapper(x), function(x))
    return wrapper


def test_a_break_in_the_middle_makes_two_graphs(pool: GraphPool) -> None:
    check_replays(lambda x: host_scale(x + 1) - 1, pool, graphs=2)


def test_each_layer_adds_one_graph(pool: GraphPool) -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            out = torch.empty_like(x)
            write_into(torch.tanh(x), out)
            x = x + out
        return x

    check_replays(layers, pool, graphs=13)


def test_empty_segments_are_not_captured(pool: GraphPool) -> None:
    check_replays(lambda x: host_scale(host_scale(x)) + 1, pool, graphs=1)
    check_replays(lambda x: host_scale(x + 1), pool, graphs=1)


def test_a_break_is_an_ordinary_function_elsewhere(pool: GraphPool) -> None:
    x = torch.randn(4, 3, device=pool.device)
    assert torch.equal(host_scale(x), x * (2.0 if x.sum().item() > 0 else 3.0))
    wrapper = CUDAGraphWrapper(lambda x: x + _flipped(x), FULL, pool=pool)
    with set_forward_context(FULL, KEY), compilation_counter.expect(num_cudagraph_captured=1):
        wrapper(x)
        assert torch.equal(wrapper(refill(x)), x + x.flip(0))


def _flipped(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    write_into(x, out)
    return out


def test_a_break_sees_the_same_addresses_on_every_replay(pool: GraphPool) -> None:
    wrapper = segmented(lambda x: host_scale(x * 2), pool)
    x = torch.randn(4, 3, device=pool.device)
    calls.clear()
    with set_forward_context(PIECEWISE, KEY):
        for _ in range(4):
            wrapper(refill(x))
    assert len(calls) == 4
    assert len(set(calls)) == 1


def test_results_written_in_place_are_not_copied(pool: GraphPool) -> None:
    """The next segment reads the very memory that the break wrote."""
    wrapper = segmented(lambda x: _flipped(x * 2) + 1, pool)
    x = torch.randn(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        wrapper(x)
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    break_call = next(step for step in entry.tape._steps if not hasattr(step, "num_nodes"))
    assert break_call.num_copies == 0


def test_a_returned_argument_is_not_copied_either(pool: GraphPool) -> None:
    @eager_break
    def negate(x: torch.Tensor) -> torch.Tensor:
        return x.neg_()

    wrapper = check_replays(lambda x: negate(x * 2).view(-1) + 1, pool, graphs=2)
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    break_call = next(step for step in entry.tape._steps if not hasattr(step, "num_nodes"))
    assert break_call.num_copies == 0


def test_nested_results_of_a_break(pool: GraphPool) -> None:
    @eager_break
    def several(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"pair": (x.sort(0).values, x.exp())}

    def function(x: torch.Tensor) -> torch.Tensor:
        low, high = several(x + 1)["pair"]
        return low * high

    check_replays(function, pool, graphs=2)


def test_a_break_that_changes_its_shape_raises(pool: GraphPool) -> None:
    rows = 4

    @eager_break
    def shrinking(x: torch.Tensor) -> torch.Tensor:
        return x[:rows] * 2

    wrapper = segmented(lambda x: shrinking(x + 1) + 1, pool)
    x = torch.randn(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        wrapper(x)
        rows = 2
        with pytest.raises(ReplayMismatchError, match=r"shrinking.*\(4, 3\).*\(2, 3\)"):
            wrapper(x)
        rows = 4
        assert torch.equal(wrapper(refill(x)), (x + 1) * 2 + 1)


def test_a_break_that_raises_leaves_no_entry(pool: GraphPool) -> None:
    fail = True

    @eager_break
    def fragile(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise RuntimeError("no block left")
        return x * 2

    wrapper = segmented(lambda x: fragile(x + 1) + 1, pool)
    x = torch.randn(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        with pytest.raises(RuntimeError, match="no block left"):
            wrapper(x)
        assert not wrapper.concrete_cudagraph_entries
        fail = False
        wrapper(x)
        assert torch.equal(wrapper(refill(x)), (x + 1) * 2 + 1)


def test_a_wrapper_may_capture_inside_a_break(pool: GraphPool) -> None:
    inner = CUDAGraphWrapper(lambda x: x * 3, PIECEWISE, pool=pool)
    broken = eager_break(lambda x: inner(x))
    outer = segmented(lambda x: broken(x + 1) - 1, pool)
    x = torch.randn(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY), compilation_counter.expect(num_cudagraph_captured=3):
        for _ in range(4):
            assert torch.equal(outer(refill(x)), (x + 1) * 3 - 1)


def test_full_around_segments(pool: GraphPool) -> None:
    inner = segmented(lambda x: _flipped(torch.tanh(x)) + 1, pool)
    outer = CUDAGraphWrapper(lambda x: inner(x), FULL, pool=pool)
    x = torch.randn(4, 3, device=pool.device)
    for mode, graphs in ((PIECEWISE, 2), (FULL, 1)):
        with (
            set_forward_context(mode, KEY),
            compilation_counter.expect(num_cudagraph_captured=graphs),
        ):
            for _ in range(3):
                assert torch.equal(outer(refill(x)), torch.tanh(x).flip(0) + 1)


def test_memory_is_shared_between_layers_and_sizes(pool: GraphPool) -> None:
    """Twelve layers take hardly more than two: what a break read can be used again after it."""

    def layers(x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = host_scale(torch.tanh(x)) + 1
        return x

    sizes = []
    for count in (2, 12):
        with GraphPool(pool.device, lazy_capture=True) as own:
            wrapper = segmented(lambda x, count=count: layers(x, count), own)
            for rows in (512, 256):
                x = torch.randn(rows, 1024, device=own.device)
                with set_forward_context(PIECEWISE, BatchDescriptor(rows)):
                    wrapper(x)
            sizes.append(own.num_bytes)
    assert sizes[1] <= sizes[0] * 1.3


def test_a_pool_that_stays_on_its_stream_has_nothing_to_follow(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.ones(4, device=device)
    assert not pool.follow_stream()
    captured = pool.capture(lambda: x * 2)
    assert not pool.follow_stream()
    pool.replay(captured.tape)
    assert not pool.follow_stream()
