"""The forward context: scoped, restored whatever happens, one per thread."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
import torch

from ostinato.errors import ConfigError, ContextError
from ostinato.graphs.capture.context import (
    ForwardContext,
    current_forward_context,
    get_forward_context,
    set_forward_context,
)
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode

KEY = BatchDescriptor(8)


def in_thread(function: Callable[[], object]) -> object:
    """What ``function`` returns, or raises, in a thread of its own."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def test_reading_without_a_context_raises_and_says_so() -> None:
    assert current_forward_context() is None
    with pytest.raises(ContextError, match=r"no forward context is set.*set_forward_context"):
        get_forward_context()


def test_context_carries_the_running_batch() -> None:
    across, slots = torch.tensor([8, 8]), torch.arange(8)
    with set_forward_context(
        CUDAGraphMode.FULL,
        KEY,
        attn_metadata={"layer": 1},
        slot_mapping=slots,
        num_tokens_across_dp=across,
    ) as entered:
        context = get_forward_context()
        assert context is entered is current_forward_context()
        assert context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        assert context.batch_descriptor == KEY
        assert context.attn_metadata == {"layer": 1}
        assert context.slot_mapping is slots
        assert context.num_tokens_across_dp is across
    assert current_forward_context() is None


def test_default_is_an_eager_batch() -> None:
    with set_forward_context() as context:
        assert context == ForwardContext(cudagraph_runtime_mode=CUDAGraphMode.NONE)


def test_nesting_restores_the_outer_context() -> None:
    with set_forward_context(CUDAGraphMode.FULL, KEY) as outer:
        with set_forward_context(CUDAGraphMode.PIECEWISE, BatchDescriptor(4)) as inner:
            assert get_forward_context() is inner
        assert get_forward_context() is outer


def test_outer_context_is_restored_after_an_exception() -> None:
    with set_forward_context(CUDAGraphMode.FULL, KEY) as outer:
        with pytest.raises(KeyError), set_forward_context():
            raise KeyError("model")
        assert get_forward_context() is outer
    with pytest.raises(KeyError), set_forward_context():
        raise KeyError("model")
    assert current_forward_context() is None


def test_one_scope_can_be_entered_again() -> None:
    scope = set_forward_context(CUDAGraphMode.FULL, KEY)
    for _ in range(2):
        with scope as context:
            assert get_forward_context() is context
        assert current_forward_context() is None


def test_another_thread_does_not_see_the_context() -> None:
    with set_forward_context(CUDAGraphMode.FULL, KEY):
        assert isinstance(in_thread(get_forward_context), ContextError)


def test_another_thread_does_not_change_the_context() -> None:
    barrier = threading.Barrier(2, timeout=30)

    def hold_another() -> None:
        with set_forward_context(CUDAGraphMode.PIECEWISE, BatchDescriptor(4)):
            barrier.wait()
            barrier.wait()

    thread = threading.Thread(target=hold_another)
    with set_forward_context(CUDAGraphMode.FULL, KEY) as mine:
        thread.start()
        barrier.wait()
        seen = get_forward_context()
        barrier.wait()
        thread.join()
        assert seen is mine
        assert get_forward_context() is mine


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_pair_is_no_runtime_mode(mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=rf"runs under NONE, PIECEWISE or FULL, not {mode.name}"):
        set_forward_context(mode, KEY)


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_graph_modes_need_a_descriptor(mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=f"{mode.name} needs a batch_descriptor"):
        set_forward_context(mode)
    assert current_forward_context() is None


def test_context_is_frozen() -> None:
    with (
        set_forward_context() as context,
        pytest.raises(dataclasses.FrozenInstanceError),
    ):
        context.cudagraph_runtime_mode = CUDAGraphMode.FULL  # type: ignore[misc]


def test_a_context_is_entered_once_at_a_time() -> None:
    context = set_forward_context("FULL", KEY)
    with context:
        with pytest.raises(ContextError, match=r"is entered already, here or in another thread"):
            context.__enter__()
        error = in_thread(context.__enter__)
        assert isinstance(error, ContextError)
        assert current_forward_context() is context.context
    assert current_forward_context() is None
    with context:  # again, after it has ended
        assert current_forward_context() is context.context
    assert current_forward_context() is None
