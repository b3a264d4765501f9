"""Operators whose CPU kernel is a Python function: a replay calls the function itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import GraphPool
from ostinato.graphs.backends.python_kernels import (
    replay_by_calling,
    replay_by_preparing,
    replay_step,
)

_LIBRARY = Library("ostinato_test_kernels", "FRAGMENT")
_LIBRARY.define("double_into(Tensor x, Tensor(a!) out, float factor) -> ()")


def double_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    torch.mul(x, factor, out=out)


_LIBRARY.impl("double_into", double_into, "CPU")
OPERATOR: Any = torch.ops.ostinato_test_kernels.double_into.default
replay_by_calling(OPERATOR, double_into)


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_replay_calls_the_function_with_the_captured_tensors() -> None:
    x = torch.randn(4)

    def forward() -> torch.Tensor:
        out = torch.empty(4)
        OPERATOR(x + 1, out, 3.0)
        return out

    with GraphPool(torch.device("cpu"), lazy_capture=True) as pool:
        captured = pool.capture(forward)
        x.copy_(torch.randn(4))
        with SeenOperators() as operators:
            pool.replay(captured.tape)
        assert torch.equal(captured.output, (x + 1) * 3.0)
    assert torch.ops.aten.mul.out in operators.seen, "the kernel did not run"
    assert OPERATOR not in operators.seen


def test_an_operator_without_a_python_kernel_is_called_itself() -> None:
    x, out = torch.ones(2), torch.empty(2)
    step: Any = replay_step(OPERATOR, (x, out, 3.0), {})
    assert step.call.func is double_into
    assert step.call.args == (x, out, 3.0)
    step = replay_step(torch.ops.aten.add_.Tensor, (x, out), {"alpha": 2})
    assert step.func is torch.ops.aten.add_.Tensor
    assert step.keywords == {"alpha": 2}


def test_a_profiler_sees_the_operator() -> None:
    x = torch.randn(4)

    def forward() -> torch.Tensor:
        out = torch.empty(4)
        OPERATOR(x, out, 3.0)
        return out

    with GraphPool(torch.device("cpu"), lazy_capture=True) as pool:
        captured = pool.capture(forward)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            pool.replay(captured.tape)
    events = {event.name: event for event in profiler.events() or []}
    assert events["aten::mul"].cpu_parent is events["ostinato_test_kernels::double_into"]


def test_a_prepared_kernel_looks_at_its_arguments_once_and_at_their_contents_every_time() -> None:
    num_prepared = 0

    def prepare(x: torch.Tensor, out: torch.Tensor, factor: float) -> Any:
        nonlocal num_prepared
        num_prepared += 1
        source, target = x.numpy(), out.numpy()

        def run() -> None:
            target[:] = source * factor

        return run

    _LIBRARY.define("prepared_double_into(Tensor x, Tensor(a!) out, float factor) -> ()")
    _LIBRARY.impl("prepared_double_into", lambda *args: prepare(*args)(), "CPU")
    operator = torch.ops.ostinato_test_kernels.prepared_double_into.default
    replay_by_preparing(operator, prepare)
    x = torch.randn(4)

    def forward() -> torch.Tensor:
        out = torch.empty(4)
        operator(x + 1, out, 3.0)
        return out

    with GraphPool(torch.device("cpu"), lazy_capture=True) as pool:
        captured = pool.capture(forward)
        after_capture = num_prepared
        for _ in range(3):
            x.copy_(torch.randn(4))
            pool.replay(captured.tape)
            assert torch.equal(captured.output, (x + 1) * 3.0)
    assert num_prepared == after_capture
