"""A token through a linear recurrence: torch's form and the kernel, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from ostinato import GraphPool
from ostinato.ops import recurrent_step

NAN = float("nan")
PADDING = 6
ROWS = [4, 0, PADDING, 5, PADDING]
FRESH = [False, True, True, False, True]
# Groups of heads, heads, keys, values: small ones, odd ones, and those of real models.
SHAPES = [(1, 1, 1, 1), (2, 4, 5, 7), (3, 3, 16, 33), (1, 2, 128, 64), (1, 2, 256, 20)]


@pytest.fixture(params=["public", "kernel"])
def step(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    """As the runtime calls it, or the kernel's launch."""
    if request.param == "public":
        return recurrent_step.recurrent_step
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return recurrent_step.triton_recurrent_step


def strided(*shape: int) -> torch.Tensor:
    """Random, with NaN between the rows."""
    wide = torch.full((shape[0], shape[1] * shape[2] + 3), NAN)
    return wide[:, 1:-2].unflatten(1, shape[1:]).copy_(torch.randn(shape))


def same_strides(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    on_device = torch.empty_strided(tensor.shape, tensor.stride(), device=device)
    return on_device.copy_(tensor)


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
@pytest.mark.parametrize(("groups", "heads", "keys", "values"), SHAPES)
def test_is_what_transformers_computes(
    groups: int,
    heads: int,
    keys: int,
    values: int,
    delta: bool,
    step: Callable[..., None],
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    count = len(ROWS)
    query, key = (strided(count, groups, keys).mul_(keys**-0.5) for _ in range(2))
    value, log_decay = strided(count, heads, values), -torch.rand(count, heads)
    beta = torch.rand(count, heads) if delta else None
    states = torch.full((PADDING + 1, heads, keys, values), NAN)
    for row, fresh in zip(ROWS, FRESH, strict=True):
        if not fresh:
            states[row].normal_()
    initial = states[ROWS].masked_fill(torch.tensor(FRESH)[:, None, None, None], 0)

    expected: Any
    if beta is not None:
        shared = [each.repeat_interleave(heads // groups, 1) for each in (query, key)]
        inputs = [each.unsqueeze(1) for each in (shared[0] * keys**0.5, shared[1], value)]
        expected, after = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
            *inputs, log_decay[:, None], beta[:, None], initial, output_final_state=True
        )
        expected = expected.squeeze(1)
    else:
        # Its decay is a time step times A, and the time step multiplies the value too.
        after = initial.mT.contiguous()
        ones = torch.ones(count, heads, values)
        expected = modeling_mamba2.mamba2_selective_state_update(
            after,
            value / -log_decay[..., None],
            ones * -log_decay[..., None],
            -torch.ones(heads, values, keys),
            key,
            query,
        )
        after = after.mT

    on_device = states.to(device)
    out = torch.full((count, heads, values), NAN, device=device)
    step(
        *(same_strides(each, device) for each in (query, key, value)),
        log_decay.to(device),
        None if beta is None else beta.to(device),
        on_device,
        torch.tensor(ROWS, device=device),
        torch.tensor(FRESH, device=device),
        out,
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    found = on_device.cpu()
    for index, row in enumerate(ROWS):
        if row != PADDING:
            torch.testing.assert_close(found[row], after[index], rtol=1e-4, atol=1e-5)
    others = [row for row in range(PADDING) if row not in ROWS]
    assert found[others].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_result_may_be_narrower(
    dtype: torch.dtype, step: Callable[..., None], device: torch.device
) -> None:
    inputs = [torch.ones(shape, device=device) for shape in ((1, 1, 4), (1, 1, 4), (1, 1, 3))]
    states = torch.full((1, 1, 4, 3), 0.25, device=device)
    out = torch.empty((1, 1, 3), dtype=dtype, device=device)
    zeros = torch.zeros(1, 1, device=device)
    rows, fresh = torch.tensor([0], device=device), torch.tensor([False], device=device)
    step(*inputs, zeros, None, states, rows, fresh, out)
    assert out.tolist() == [[[5.0, 5.0, 5.0]]]
    assert (states == 1.25).all()


def test_replays_with_new_contents(device: torch.device, pool: GraphPool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 1, 4, device=device) for _ in range(3)]
    numbers = [torch.rand(2, 1, device=device) for _ in range(2)]
    rows, fresh = torch.tensor([2, 2], device=device), torch.tensor([True, True], device=device)
    states, eager = (torch.zeros(3, 1, 4, 4, device=device) for _ in range(2))
    out, expected = (torch.zeros(2, 1, 4, device=device) for _ in range(2))

    def run(states: torch.Tensor, out: torch.Tensor) -> None:
        recurrent_step.recurrent_step(*inputs, *numbers, states, rows, fresh, out)

    run(states, out)
    captured = pool.capture(lambda: run(states, out))
    for step in range(3):
        rows.copy_(torch.tensor([0, 1]))
        fresh.fill_(step == 0)
        for each in (*inputs, *numbers):
            each.copy_(torch.rand(each.shape))
        pool.replay(captured.tape)
        run(eager, expected)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(states[:2], eager[:2])


def test_says_what_it_writes(device: torch.device) -> None:
    vectors = [torch.rand(2, 1, 4, device=device) for _ in range(3)]
    numbers = [torch.rand(2, 1, device=device) for _ in range(2)]
    rows, fresh = torch.tensor([0, 1], device=device), torch.tensor([True, False], device=device)
    states, out = (torch.zeros(shape, device=device) for shape in ((2, 1, 4, 4), (2, 1, 4)))
    torch.library.opcheck(
        torch.ops.ostinato.recurrent_step.default,
        (*vectors, *numbers, states, rows, fresh, out),
        test_utils=["test_schema", "test_faketensor"],
    )
