"""A token through a causal convolution: torch's form and the kernel, against ``conv1d``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ostinato import GraphPool
from ostinato.ops import conv_step

NAN = float("nan")
PADDING = 6
ROWS = [4, 0, PADDING, 5, PADDING]
FRESH = [False, True, True, False, True]


@pytest.fixture(params=["public", "kernel"])
def step(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    """As the runtime calls it, or the kernel's launch."""
    if request.param == "public":
        return conv_step.conv_step
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return conv_step.triton_conv_step


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 7), (3, 300), (3, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_is_a_convolution(
    dtype: torch.dtype,
    width: int,
    channels: int,
    bias: bool,
    step: Callable[..., None],
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    wide = torch.full((len(ROWS), channels + 3), NAN, dtype=dtype, device=device)
    inputs = wide[:, 1:-2].copy_(torch.randn(len(ROWS), channels))
    weight = torch.randn(channels, width + 1, device=device).to(dtype)
    offset = torch.randn(channels, device=device).to(dtype) if bias else None
    windows = torch.full((PADDING + 1, width, channels), NAN, dtype=dtype, device=device)
    for row, fresh in zip(ROWS, FRESH, strict=True):
        if not fresh:
            windows[row].normal_()
    before = windows[ROWS].masked_fill(torch.tensor(FRESH, device=device)[:, None, None], 0)
    sequences = torch.cat([before, inputs.unsqueeze(1)], dim=1)
    expected = F.conv1d(
        sequences.mT.double(),
        weight.double().unsqueeze(1),
        None if offset is None else offset.double(),
        groups=channels,
    ).squeeze(-1)
    out = torch.full((len(ROWS), channels), NAN, device=device)
    rows, fresh_rows = torch.tensor(ROWS, device=device), torch.tensor(FRESH, device=device)
    step(inputs, weight, offset, windows, rows, fresh_rows, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for index, row in enumerate(ROWS):
        if row != PADDING:
            assert torch.equal(windows[row], sequences[index, 1:])
    assert windows[[row for row in range(PADDING) if row not in ROWS]].isnan().all()


def test_replays_with_new_contents(device: torch.device, pool: GraphPool) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 5, device=device), torch.randn(5, 3, device=device)
    rows, fresh = torch.tensor([2, 2], device=device), torch.tensor([True, True], device=device)
    windows, eager = (torch.zeros(3, 2, 5, device=device) for _ in range(2))
    out, expected = (torch.zeros(2, 5, device=device) for _ in range(2))

    def run(windows: torch.Tensor, out: torch.Tensor) -> None:
        conv_step.conv_step(inputs, weight, None, windows, rows, fresh, out)

    run(windows, out)
    captured = pool.capture(lambda: run(windows, out))
    for step in range(3):
        rows.copy_(torch.tensor([0, 1]))
        fresh.fill_(step == 0)
        inputs.copy_(torch.randn(2, 5))
        pool.replay(captured.tape)
        run(eager, expected)
        assert torch.equal(out, expected)
        assert torch.equal(windows[:2], eager[:2])


def test_says_what_it_writes(device: torch.device) -> None:
    inputs, weight = torch.randn(2, 5, device=device), torch.randn(5, 3, device=device)
    rows, fresh = torch.tensor([0, 1], device=device), torch.tensor([True, False], device=device)
    windows, out = torch.zeros(2, 2, 5, device=device), torch.zeros(2, 5, device=device)
    torch.library.opcheck(
        torch.ops.ostinato.conv_step.default,
        (inputs, weight, None, windows, rows, fresh, out),
        test_utils=["test_schema", "test_faketensor"],
    )
