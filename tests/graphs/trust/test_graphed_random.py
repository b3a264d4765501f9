"""Random callables under graphed(): right or refused, never silently different from eager.

A callable is a few steps drawn from a table, many of them hazards: rows out of order, statistics
over the batch, writes to arguments and state, branches, autocast. Between calls weights move,
values change and torch's switches are toggled. Every call is compared with the same model run
eagerly.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ostinato import graphed
from ostinato.errors import OstinatoError

WIDTH = 4
Step = Callable[["Program", torch.Tensor], torch.Tensor]


class Program(nn.Module):
    """Runs steps in order on its argument."""

    def __init__(self, steps: list[Step], shape: str, device: torch.device) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds
        self.steps, self.shape = steps, shape
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))
        self.plain = torch.ones(WIDTH, device=device)
        self.lazy: torch.Tensor | None = None
        self.scale, self.flag, self.calls = 2.0, True, 0
        self.history = [torch.zeros(WIDTH, device=device)]
        self.to(device)

    def forward(self, x: torch.Tensor) -> Any:
        argument = x
        for step in self.steps:
            x = step(self, x)
        if self.shape == "pair":
            return x, argument + 1
        if self.shape == "dict":
            return {"x": x, "more": [x * 2, self.total + 0]}
        return x


# --- steps ----------------------------------------------------------------------------------------


def in_place(change: Callable[[Program, torch.Tensor], object]) -> Step:
    def step(program: Program, x: torch.Tensor) -> torch.Tensor:
        change(program, x)
        return x

    return step


def add_to_total(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.total.add_(1)
    return x + program.total


def sum_into_total(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.total.add_(x.sum(0)[:WIDTH])
    return x


def replace_plain(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.plain = program.plain + 1
    return x * program.plain


def make_lazily(program: Program, x: torch.Tensor) -> torch.Tensor:
    if program.lazy is None:
        program.lazy = torch.full((WIDTH,), 0.5, device=x.device)
    return x + program.lazy


def change_lazily(program: Program, x: torch.Tensor) -> torch.Tensor:
    return make_lazily(program, x) + program.lazy.mul_(2)


def count_calls(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.calls += 1
    return x


def use_count(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.calls += 1
    return x * program.calls


def replace_item(program: Program, x: torch.Tensor) -> torch.Tensor:
    program.history[0] = program.history[0] + x[0]
    return x + program.history[0]


def cast_inside(program: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return program.linear(x).float()


def in_inference_mode(program: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 3
        return y + (1 if y.sum() > 0 else -1)


TAME: dict[str, Step] = {
    "linear": lambda p, x: p.linear(x.to(p.linear.weight.dtype)),
    "tanh": lambda p, x: x.tanh(),
    "scale": lambda p, x: x * p.scale,
    "plain": lambda p, x: x + p.plain,
    "softmax": lambda p, x: x.softmax(-1),
    "flip features": lambda p, x: x.flip(-1),
    "cumsum of features": lambda p, x: x.cumsum(-1),
    "temporary in place": lambda p, x: (x + 0).mul_(2).add_(1),
    "flag": lambda p, x: x * 2 if p.flag else x - 1,
    "where": lambda p, x: torch.where(x > 0, x, x * 0.5),
    "mean of a row": lambda p, x: x - x.mean(-1, keepdim=True),
}

HAZARDS: dict[str, Step] = {
    "cat": lambda p, x: torch.cat([x, -x]),
    "stack": lambda p, x: torch.stack([x, x + 1]).reshape(-1, WIDTH),
    "stack by row": lambda p, x: torch.stack([x, x + 1], 1).reshape(-1, WIDTH),
    "flip": lambda p, x: x.flip(0),
    "roll": lambda p, x: x.roll(1, 0),
    "transpose": lambda p, x: x.T.reshape(-1, WIDTH) if x.numel() % WIDTH == 0 else x,
    "mean": lambda p, x: x - x.mean(0),
    "max": lambda p, x: x / (1 + x.abs().max()),
    "softmax of the batch": lambda p, x: x.softmax(0),
    "cumsum of the batch": lambda p, x: x.cumsum(0),
    "sort": lambda p, x: x.sort(0).values,
    "batch norm": lambda p, x: p.norm(x.to(p.norm.weight.dtype)),
    "attention": lambda p, x: torch.softmax(x @ x.T, -1) @ x,
    "number of rows": lambda p, x: x * x.shape[0],
    "branch on rows": lambda p, x: x * 2 if x.shape[0] > 2 else x,
    "branch on values": lambda p, x: x * 2 if x.sum() > 0 else x,
    "branch in inference mode": in_inference_mode,
    "item": lambda p, x: x * x.mean().item(),
    "mask": lambda p, x: x[x[:, 0] > 0] if x.shape[0] else x,
    "add in place": in_place(lambda p, x: x.add_(1)),
    "column in place": in_place(lambda p, x: x[:, 0].mul_(2)),
    "row in place": in_place(lambda p, x: x[0].zero_()),
    "count in a buffer": add_to_total,
    "sum into a buffer": sum_into_total,
    "replace an attribute": replace_plain,
    "replace an item": replace_item,
    "make lazily": make_lazily,
    "change lazily": change_lazily,
    "count": count_calls,
    "use a count": use_count,
    "autocast": cast_inside,
    "default dtype": lambda p, x: x.to(torch.get_default_dtype()),
}

STEPS = TAME | HAZARDS

# --- between calls --------------------------------------------------------------------------------

# Each is applied to both models, and must lead to the same result or to a refusal.
EVENTS: dict[str, Callable[[Program], object]] = {
    "nothing": lambda p: None,
    "weights in place": lambda p: p.linear.weight.data.mul_(2),
    "weights replaced": lambda p: setattr(
        p.linear, "weight", nn.Parameter(p.linear.weight.detach() * 2)
    ),
    "data replaced": lambda p: setattr(p.linear.weight, "data", p.linear.weight.data * 2),
    "weight and bias data": lambda p: [
        setattr(each, "data", each.data * 2) for each in p.linear.parameters()
    ],
    "module replaced": lambda p: setattr(p, "linear", copy.deepcopy(p.linear).requires_grad_()),
    "buffer replaced": lambda p: setattr(p, "total", p.total + 1),
    "attribute replaced": lambda p: setattr(p, "plain", p.plain * 3),
    "number": lambda p: setattr(p, "scale", p.scale + 1),
    "switch": lambda p: setattr(p, "flag", not p.flag),
    "eval": lambda p: p.norm.eval(),
    "train": lambda p: p.norm.train(),
    "state loaded": lambda p: p.load_state_dict(
        {name: tensor * 2 for name, tensor in p.state_dict().items()}
    ),
    "state assigned": lambda p: p.load_state_dict(
        {name: tensor * 2 for name, tensor in p.state_dict().items()}, assign=True
    ),
    "half": lambda p: p.linear.half().float(),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[str], Any]] = {
    "nothing": lambda device: contextlib.nullcontext(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "inference mode": lambda device: torch.inference_mode(),
    "float64": lambda device: default_dtype(torch.float64),
}

CALLS = st.tuples(
    st.integers(1, 5),
    st.sampled_from(list(EVENTS)),
    st.sampled_from(list(AROUND)),
    st.sampled_from(["random", "random", "zeros", "ones", "the same row twice"]),
)
SHAPES = st.sampled_from(["tensor", "pair", "dict"])


def batch(rows: int, content: str, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    if content == "zeros":
        x.zero_()
    elif content == "ones":
        x.fill_(1)
    elif content == "the same row twice":
        x[-1] = x[0]
    return x.to(device)


def run_program(
    device: torch.device, steps: list[str], shape: str, calls: list[tuple[int, str, str, str]]
) -> str | None:
    """Compare every call with eager. Returns the refusal's text, or None if all were right."""
    # Only the steps it runs: a program that refers to STEPS has all of them watched at every call.
    program = Program([STEPS[step] for step in steps], shape, device)
    reference = copy.deepcopy(program)
    with graphed(program, sizes=[2, 4], copy_outputs=True) as fast:
        for number, (rows, event, around, content) in enumerate(calls):
            with torch.no_grad():
                EVENTS[event](program)
                EVENTS[event](reference)
            x = batch(rows, content, number, device)
            y = x.clone()
            with torch.no_grad(), AROUND[around](device.type):
                try:
                    want = reference(y)
                except (RuntimeError, ValueError, IndexError) as error:
                    return f"eager itself fails: {error}"
                try:
                    got = fast(x)
                except OstinatoError as error:
                    return str(error)
            loose = around == "autocast" or "autocast" in steps
            tolerance = {"rtol": 3e-2, "atol": 3e-2} if loose else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(got, want, **tolerance, equal_nan=True)
            torch.testing.assert_close(x, y, **tolerance, equal_nan=True)
            for name, tensor in reference.named_buffers():
                torch.testing.assert_close(
                    program.get_buffer(name), tensor, **tolerance, equal_nan=True
                )
            torch.testing.assert_close(program.plain, reference.plain)
    return None


same_device = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=same_device)
@given(
    steps=st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=3),
    shape=SHAPES,
    calls=st.lists(CALLS, min_size=1, max_size=4),
)
def test_random_callables_are_right_or_refused(
    device: torch.device, steps: list[str], shape: str, calls: list[tuple[int, str, str, str]]
) -> None:
    run_program(device, steps, shape, calls)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=same_device)
@given(
    steps=st.lists(st.sampled_from(list(TAME)), min_size=1, max_size=4),
    shape=SHAPES,
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    around=st.sampled_from(list(AROUND)),
)
def test_callables_without_hazards_are_not_refused(
    device: torch.device, steps: list[str], shape: str, rows: list[int], around: str
) -> None:
    calls = [(count, "weights in place", around, "random") for count in rows]
    assert run_program(device, steps, "tensor" if shape == "dict" else shape, calls) is None


@pytest.mark.sweep
@pytest.mark.parametrize("step", HAZARDS)
@pytest.mark.parametrize("content", ["random", "zeros", "ones"])
def test_each_hazard_alone(device: torch.device, step: str, content: str) -> None:
    calls = [(rows, "nothing", "nothing", content) for rows in (4, 3, 3, 2, 1, 5)]
    calls += [(rows, "nothing", "nothing", "random") for rows in (3, 1, 4)]
    run_program(device, [step], "tensor", calls)


@pytest.mark.sweep
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("around", AROUND)
def test_each_event_alone(device: torch.device, event: str, around: str) -> None:
    steps = ["linear", "scale", "plain", "flag"]
    calls = [(3, "nothing", "nothing", "random"), (3, event, around, "random")]
    calls += [(3, "nothing", "nothing", "random"), (4, "nothing", around, "random")]
    run_program(device, steps, "tensor", calls)
