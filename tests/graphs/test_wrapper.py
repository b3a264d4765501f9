"""CUDAGraphWrapper, point by point of what the contract asks of it."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from types import FrameType

import pytest
import torch
from torch import nn

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphPool,
    compilation_counter,
    set_forward_context,
)
from ostinato.errors import CaptureError, ConfigError, ReplayMismatchError

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
KEY = BatchDescriptor(4)


class Doubler(nn.Module):
    """Counts its runs, to tell a replay from a call."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.scale + 1


def refill(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(torch.randn_like(x))


@pytest.mark.parametrize("mode", [NONE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_only_full_and_piecewise_can_be_bound(pool: GraphPool, mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=f"FULL or PIECEWISE, not {mode.name}"):
        CUDAGraphWrapper(Doubler(), mode, pool=pool)


def test_without_a_context_it_only_calls(pool: GraphPool) -> None:
    model = Doubler()
    wrapper = CUDAGraphWrapper(model, FULL, pool=pool)
    x = torch.ones(4, 2, device=pool.device)
    wrapper(x)
    wrapper(x.clone())
    assert model.runs == 2
    assert not wrapper.concrete_cudagraph_entries


@pytest.mark.parametrize("other", [NONE, PIECEWISE])
def test_under_another_mode_it_only_calls(pool: GraphPool, other: CUDAGraphMode) -> None:
    model = Doubler()
    wrapper = CUDAGraphWrapper(model, FULL, pool=pool)
    with set_forward_context(other, KEY):
        wrapper(torch.ones(4, 2, device=pool.device))
    assert model.runs == 1
    assert not wrapper.concrete_cudagraph_entries


def test_first_call_captures_and_later_calls_replay(pool: GraphPool) -> None:
    model = Doubler()
    wrapper = CUDAGraphWrapper(model, FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    with set_forward_context(FULL, KEY), compilation_counter.expect(num_cudagraph_captured=1):
        first = wrapper(x)
        assert torch.equal(first, x * 2 + 1)
        for _ in range(3):
            refill(x)
            assert torch.equal(wrapper(x), x * 2 + 1)
    assert model.runs == 1


def test_the_first_replay_is_checked_as_fast_as_every_other(pool: GraphPool) -> None:
    """A capture runs outside of inference mode; replays run inside, and some outside."""
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    x = torch.randn(8, 2, device=pool.device)

    def python_calls(inference: bool) -> list[str]:
        calls: list[str] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                calls.append(frame.f_code.co_qualname)

        with torch.inference_mode(inference), set_forward_context(FULL, KEY):
            batch = x[:4]
            sys.setprofile(note)
            try:
                wrapper(batch)
            finally:
                sys.setprofile(None)
        return calls

    with torch.no_grad(), set_forward_context(FULL, KEY):
        wrapper(x[:4])
    first = python_calls(inference=True)
    assert first == python_calls(inference=True) == python_calls(inference=False)


def test_each_descriptor_has_its_own_graph(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    inputs = {n: torch.randn(n, 2, device=pool.device) for n in (4, 2, 1)}
    with compilation_counter.expect(num_cudagraph_captured=3):
        for _ in range(2):
            for n, x in inputs.items():
                with set_forward_context(FULL, BatchDescriptor(n)):
                    assert torch.equal(wrapper(refill(x)), x * 2 + 1)


def test_replay_returns_the_static_output(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    with set_forward_context(FULL, KEY):
        first = wrapper(x)
        second, third = wrapper(x), wrapper(x)
    assert first.data_ptr() == second.data_ptr() == third.data_ptr()


def test_stored_output_is_weak_and_first_is_strong(pool: GraphPool) -> None:
    """While a caller holds the first output, no other capture may use its memory."""
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    x = torch.randn(64, 64, device=pool.device)
    with set_forward_context(FULL, KEY):
        first = wrapper(x)
    address = first.data_ptr()
    with set_forward_context(FULL, BatchDescriptor(5)):
        assert wrapper(x.clone()).data_ptr() != address
    del first
    gc.collect()
    with set_forward_context(FULL, BatchDescriptor(6)):
        assert wrapper(x.clone()).data_ptr() == address


def test_weak_ref_output_frees_the_memory_at_once(pool: GraphPool) -> None:
    options = CUDAGraphOptions(weak_ref_output=True)
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool, cudagraph_options=options)
    x = torch.randn(64, 64, device=pool.device)
    with set_forward_context(FULL, KEY):
        held = wrapper(x)
        assert torch.equal(held, x * 2 + 1)
    with set_forward_context(FULL, BatchDescriptor(5)):
        assert wrapper(x.clone()).data_ptr() == held.data_ptr()


def test_moved_argument_is_named_with_both_addresses(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    moved = x.clone()
    with set_forward_context(FULL, KEY):
        wrapper(x)
        with pytest.raises(ReplayMismatchError, match="argument 'x' moved") as error:
            wrapper(moved)
        assert hex(x.data_ptr()) in str(error.value)
        assert hex(moved.data_ptr()) in str(error.value)
        assert torch.equal(wrapper(refill(x)), x * 2 + 1)  # still usable


def test_nested_and_keyword_arguments_are_checked(pool: GraphPool) -> None:
    def add(pair: list[torch.Tensor], *, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1] + batch["bias"]

    wrapper = CUDAGraphWrapper(add, FULL, pool=pool)
    a, b, c = (torch.randn(3, device=pool.device) for _ in range(3))
    with set_forward_context(FULL, KEY):
        wrapper([a, b], batch={"bias": c})
        assert torch.equal(wrapper([a, b], batch={"bias": c}), a + b + c)
        with pytest.raises(ReplayMismatchError, match=r"pair\[1\]"):
            wrapper([a, b.clone()], batch={"bias": c})
        with pytest.raises(ReplayMismatchError, match=r"batch\['bias'\]"):
            wrapper([a, b], batch={"bias": c.clone()})


def test_capture_outside_start_up_names_the_descriptor(device: torch.device) -> None:
    with GraphPool(device) as pool:
        wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
        x = torch.ones(4, 2, device=device)
        with set_forward_context(FULL, KEY):
            message = r"no graph was captured for BatchDescriptor\(num_tokens=4.*is not enabled"
            with pytest.raises(CaptureError, match=message):
                wrapper(x)
            with pool.capturing():
                wrapper(x)
            assert torch.equal(wrapper(x), x * 2 + 1)


def test_full_around_piecewise_do_not_interfere(pool: GraphPool) -> None:
    pieces = [CUDAGraphWrapper(Doubler(), PIECEWISE, pool=pool) for _ in range(3)]

    def whole(x: torch.Tensor) -> torch.Tensor:
        for piece in pieces:
            x = piece(x)
        return x

    outer = CUDAGraphWrapper(whole, FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    for mode, graphs in ((PIECEWISE, 3), (FULL, 1)):
        with (
            set_forward_context(mode, KEY),
            compilation_counter.expect(num_cudagraph_captured=graphs),
        ):
            for _ in range(3):
                assert torch.equal(outer(refill(x)), ((x * 2 + 1) * 2 + 1) * 2 + 1)


def test_gc_option_decides_whether_garbage_is_collected(pool: GraphPool) -> None:
    def capture_with_garbage(gc_disable: bool, tokens: int) -> bool:
        """Whether a cycle made before the capture survived it."""
        cycle = Doubler()
        cycle.me = cycle  # type: ignore[assignment]
        alive = weakref.ref(cycle)
        del cycle
        options = CUDAGraphOptions(gc_disable=gc_disable)
        wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool, cudagraph_options=options)
        with set_forward_context(FULL, BatchDescriptor(tokens)):
            wrapper(torch.ones(2, device=pool.device))
        return alive() is not None

    gc.disable()
    try:
        assert capture_with_garbage(gc_disable=True, tokens=1)
        assert not capture_with_garbage(gc_disable=False, tokens=2)
    finally:
        gc.enable()
    assert gc.isenabled()


def test_clear_graphs_drops_entries_and_captures_again(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    with set_forward_context(FULL, KEY):
        wrapper(x)
        wrapper.clear_graphs()
        assert not wrapper.concrete_cudagraph_entries
        with compilation_counter.expect(num_cudagraph_captured=1):
            assert torch.equal(wrapper(refill(x)), x * 2 + 1)


def test_unwrap_and_attributes_come_from_the_runnable(pool: GraphPool) -> None:
    model = Doubler()
    wrapper = CUDAGraphWrapper(model, FULL, pool=pool)
    assert wrapper.unwrap() is model
    assert wrapper.scale == 2.0
    with pytest.raises(AttributeError, match=r"CUDAGraphWrapper.*Doubler.*'nothing'"):
        _ = wrapper.nothing


def test_capture_that_raises_leaves_nothing_and_is_tried_again(pool: GraphPool) -> None:
    fail = True

    def fragile(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if fail:
            raise KeyError("weights")
        return y + 1

    wrapper = CUDAGraphWrapper(fragile, FULL, pool=pool)
    x = torch.randn(4, 2, device=pool.device)
    with set_forward_context(FULL, KEY):
        with (
            compilation_counter.expect(num_cudagraph_captured=0),
            pytest.raises(KeyError, match="weights") as error,
        ):
            wrapper(x)
        assert any("num_tokens=4" in note for note in error.value.__notes__)
        assert not wrapper.concrete_cudagraph_entries
        assert torch.rand(3, device=pool.device).shape == (3,)  # the stream is usable
        fail = False
        wrapper(x)
        assert torch.equal(wrapper(refill(x)), x * 2 + 1)


def test_capture_is_logged_unless_switched_off(
    pool: GraphPool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="ostinato"):
        for tokens, log in ((1, True), (2, False)):
            options = CUDAGraphOptions(debug_log_enable=log)
            wrapper = CUDAGraphWrapper(Doubler(), FULL, pool=pool, cudagraph_options=options)
            with set_forward_context(FULL, BatchDescriptor(tokens)):
                wrapper(torch.ones(2, device=pool.device))
    assert [record.args[0].num_tokens for record in caplog.records] == [1]


def test_other_numerics_than_at_capture_are_refused(pool: GraphPool) -> None:
    """Eagerly the call would run other kernels."""
    device = pool.device
    wrapper = CUDAGraphWrapper(lambda x: x @ x, FULL, pool=pool)
    x = torch.eye(4, device=device)
    with set_forward_context(FULL, BatchDescriptor(4)):
        wrapper(x)
        with (
            torch.autocast(device.type, dtype=torch.bfloat16),
            pytest.raises(ReplayMismatchError, match=r"autocast was None .* is torch\.bfloat16"),
        ):
            wrapper(x)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(ReplayMismatchError, match="deterministic algorithms was False"):
                wrapper(x)
        finally:
            torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("medium")
        try:
            with pytest.raises(ReplayMismatchError, match="matmul precision was highest"):
                wrapper(x)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert torch.equal(wrapper(x), x)
