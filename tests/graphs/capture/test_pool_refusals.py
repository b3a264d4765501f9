"""What a pool refuses, because its graphs share memory or because it is not the time to capture."""

from __future__ import annotations

import threading

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    eager_break,
    set_forward_context,
)
from ostinato.errors import CaptureError, ClosedError, ConcurrentUseError, ConfigError

PIECEWISE = CUDAGraphMode.PIECEWISE
KEY = BatchDescriptor(4)


def test_a_capture_needs_start_up_or_lazy_capture(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    with GraphPool(device) as pool:
        with pytest.raises(CaptureError, match=r"not enabled; capture at start-up .*lazy_capture"):
            pool.capture(lambda: x + 1)
        with pool.capturing():
            assert torch.equal(pool.capture(lambda: x + 1).output, x + 1)
        with pytest.raises(CaptureError, match="capturing is not enabled"):
            pool.capture(lambda: x + 1)


def test_a_capture_in_a_break_that_is_replayed(pool: GraphPool) -> None:
    inner = CUDAGraphWrapper(lambda x: x * 3, PIECEWISE, pool=pool)
    through_graph = False
    broken = eager_break(lambda x: inner(x) if through_graph else x * 3)
    outer = CUDAGraphWrapper(lambda x: broken(x) - 1, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.ones(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        outer(x)
        through_graph = True
        with pytest.raises(CaptureError, match=r"captured in an eager break while .* was replayed"):
            outer(x)
        through_graph = False
        assert torch.equal(outer(x), x * 3 - 1)


def test_a_part_of_a_forward_that_is_captured_after_another_was_replayed(pool: GraphPool) -> None:
    first = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE, pool=pool)
    second = CUDAGraphWrapper(lambda x: x * 2, PIECEWISE, pool=pool)
    x = torch.ones(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        first(x)
    with set_forward_context(PIECEWISE, KEY):
        hidden = first(x)
        with pytest.raises(CaptureError, match=r"num_tokens=4.* for one part of the forward but"):
            second(hidden)
    first.clear_graphs()
    with set_forward_context(PIECEWISE, KEY):
        assert torch.equal(second(first(x)), (x + 1) * 2)


def test_a_replay_while_another_thread_replays(pool: GraphPool) -> None:
    """The second thread comes while the first is in an eager break, so they surely meet."""
    errors: list[BaseException] = []
    meet = False

    def from_another_thread() -> None:
        try:
            with set_forward_context(PIECEWISE, KEY):
                outer(x)
        except ConcurrentUseError as error:
            errors.append(error)

    @eager_break
    def broken(x: torch.Tensor) -> torch.Tensor:
        if meet:
            thread = threading.Thread(target=from_another_thread, name="second")
            thread.start()
            thread.join()
        return x * 3

    outer = CUDAGraphWrapper(lambda x: broken(x) - 1, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.ones(4, 3, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        outer(x)
        meet = True
        assert torch.equal(outer(x), x * 3 - 1)
    (error,) = errors
    assert "thread 'second' used graphs while another thread was" in str(error)


def test_all_graphs_of_a_pool_are_dropped_at_once(device: torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    with GraphPool(device, lazy_capture=True) as pool:
        wrappers = [CUDAGraphWrapper(torch.neg, CUDAGraphMode.FULL, pool=pool) for _ in range(2)]
        with set_forward_context("FULL", BatchDescriptor(2, num_reqs=2)):
            for wrapper in wrappers:
                wrapper(x)
        for wrapper in wrappers:
            ((key, entry),) = wrapper.concrete_cudagraph_entries.items()
            assert entry.batch_descriptor == key
        pool.clear_all_graphs()
        assert [wrapper.concrete_cudagraph_entries for wrapper in wrappers] == [{}, {}]
        pool.lazy_capture = False
        with pytest.raises(CaptureError, match="capturing is not enabled"):
            pool.validate_cudagraph_capturing_enabled(BatchDescriptor(2))
    with pytest.raises(ClosedError, match="the graph pool is closed"):
        pool.validate_cudagraph_capturing_enabled(BatchDescriptor(2))
    with pytest.raises(ClosedError):
        pool.clear_all_graphs()


@pytest.mark.parametrize("other", [None, "cpu"])
def test_what_is_no_pool_is_refused(other: object) -> None:
    plan = CapturePlan.build(PIECEWISE, [2], max_num_seqs=2, max_num_batched_tokens=2)
    for make in (
        lambda: CUDAGraphWrapper(lambda x: x, PIECEWISE, pool=other),  # type: ignore[arg-type]
        lambda: CudaGraphManager(plan, other),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=f"an ostinato.GraphPool, got {other!r}"):
            make()


@pytest.mark.parametrize("generators", [torch.Generator(), ["g"]])
def test_what_are_no_generators_is_refused(generators: object, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"generators must be a list of torch.Generator, got "):
        GraphPool(device, generators=generators)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [None, "gpu"])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(ConfigError, match=f"device must be a torch.device .*, got {device!r}; pas"):
        GraphPool(device)  # type: ignore[arg-type]


def test_what_is_no_function_is_no_break() -> None:
    with pytest.raises(ConfigError, match=r"eager_break\(\) marks a function, got 3"):
        eager_break(3)  # type: ignore[type-var]
