"""Calls that are interrupted anywhere leave their thread, and the process, as they found them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from interrupts import (
    check_interrupts,
    finalisers_failing_silently,
    interrupt_at,
    thread_state,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import (
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    PlanEntry,
    PreparedBatch,
    eager_break,
    graphed,
)
from ostinato.graphs.thread_state import SharedSwitch, leaving_as_found, thread_variable

CPU = torch.device("cpu")


class Unchanged(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CALLERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).eval()


@pytest.mark.parametrize("caller", CALLERS)
def test_a_replay_that_is_interrupted(device: torch.device, caller: str) -> None:
    model, x = small_model().to(device), torch.randn(3, 4, device=device)
    with CALLERS[caller](), graphed(model, sizes=[4], copy_outputs=True) as fast:
        expected = fast(x)
        assert check_interrupts(lambda: fast(x), range(10_000)) > 30
        assert torch.equal(fast(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_capture_that_is_interrupted(caller: str, mode: str) -> None:
    """On the CPU, where all of a capture is ours. Of some 7,000 functions, every 29th."""
    model, x = small_model(), torch.randn(3, 4)
    halve = eager_break(lambda x: x / 2)

    def call() -> torch.Tensor:
        with graphed(lambda x: halve(model(x)), sizes=[2, 4], mode=mode, copy_outputs=True) as fast:
            return fast(x)

    with CALLERS[caller]():
        expected = call()
        start = 7 * list(CALLERS).index(caller) + 3 * (mode == "FULL")
        assert check_interrupts(call, range(start, 100_000, 29)) > 100
        assert torch.equal(call(), expected)


@pytest.mark.slow
def test_an_interrupted_first_call_takes_effect_once_or_not_at_all() -> None:
    """It runs the callable several times, and undoes what that wrote. Of 5,500, every 37th."""
    x = torch.randn(3, 4)

    for number in range(0, 100_000, 37):
        count = torch.zeros(4)
        with graphed(lambda x, count=count: count.add_(1) * 0 + x, sizes=[2, 4]) as fast:
            with finalisers_failing_silently():
                interrupt = interrupt_at(number, lambda fast=fast: fast(x))
            if interrupt is None:
                break
            assert count.tolist() in ([0.0] * 4, [1.0] * 4), f"after an interrupt at {number}"
            before = count.clone()
            assert torch.equal(fast(x), x)
            assert torch.equal(count, before + 1)
    assert number > 1000


@pytest.mark.slow
def test_a_manager_that_is_interrupted() -> None:
    """Its forward runs under a forward context, in which a wrapper captures pieces."""
    weight = torch.randn(4, 4)

    def call() -> None:
        with GraphPool(CPU) as pool:
            inputs = torch.zeros(4, 4)
            plan = CapturePlan.build(
                CUDAGraphMode.FULL_AND_PIECEWISE,
                [1, 4],
                max_num_seqs=4,
                max_num_batched_tokens=4,
            )
            forward = CUDAGraphWrapper(
                lambda x: (x @ weight).relu(), CUDAGraphMode.PIECEWISE, pool=pool
            )

            def prepare(entry: PlanEntry) -> PreparedBatch[torch.Tensor]:
                return PreparedBatch(inputs=inputs[: entry.descriptor.num_tokens])

            CudaGraphManager(plan, pool, show_progress=False).capture(forward, prepare)

    call()
    assert check_interrupts(call, range(0, 100_000, 23)) > 50
    call()


# --- the parts ----------------------------------------------------------------------------------


VARIABLE = thread_variable("test", "default")
BLOCKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "dispatch mode": Unchanged,
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("left_open", BLOCKS)
@pytest.mark.parametrize("caller", BLOCKS)
def test_blocks_that_were_not_left_are_left(caller: str, left_open: str) -> None:
    block = BLOCKS[left_open]()

    @leaving_as_found
    def enter() -> None:
        block.__enter__()
        VARIABLE.set("inside")
        raise ValueError("no time to leave")

    with BLOCKS[caller]():
        before = thread_state()
        with pytest.raises(ValueError, match="no time to leave"):
            enter()
        assert thread_state() == before
        assert VARIABLE.get() == "default"
        assert float(torch.ones(2, device="cpu").sum()) == 2  # operators do what they did


def test_what_returns_keeps_its_changes() -> None:
    @leaving_as_found
    def switch_off() -> None:
        torch.set_grad_enabled(False)

    try:
        switch_off()
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_a_switch_is_on_while_any_thread_holds_it() -> None:
    """The first to begin is the first to end."""
    log: list[str] = []
    switch = SharedSwitch(lambda: log.append("on"), lambda: log.append("off"))
    begun, end = threading.Event(), threading.Event()

    def first() -> None:
        with switch.held():
            begun.set()
            assert end.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    with switch.held():
        assert switch.num_holds == 2
        end.set()
        thread.join(60)
        assert (switch.num_holds, log) == (1, ["on"])
    assert (switch.num_holds, log) == (0, ["on", "off"])


def test_a_hold_that_was_not_ended_is_ended_with_the_call() -> None:
    log: list[str] = []
    switch = SharedSwitch(lambda: log.append("on"), lambda: log.append("off"))
    held = []

    @leaving_as_found
    def hold() -> None:
        held.append(switch.held())
        held[0].__enter__()
        raise ValueError("no time to end it")

    with switch.held():
        with pytest.raises(ValueError, match="no time"):
            hold()
        assert (switch.num_holds, log) == (1, ["on"])
        with pytest.raises(StopIteration):  # ending it late changes nothing
            next(held[0].gen)
        assert switch.num_holds == 1
    assert log == ["on", "off"]


def test_a_switch_that_does_not_turn_on_is_not_held() -> None:
    def refuse() -> None:
        raise ValueError("not now")

    switch = SharedSwitch(refuse)
    with pytest.raises(ValueError, match="not now"), switch.held():
        pass
    assert switch.num_holds == 0
