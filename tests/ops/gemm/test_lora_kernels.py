"""LoRA of a GEMM against a loop over rows, as the runtime calls it and as the kernels' launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import GraphPool
from ostinato.ops.gemm import lora
from ostinato.ops.gemm.lora import NO_SLOT, NOT_ACTIVE, LoraRows, LoraWeights

pytest.importorskip("triton")

few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["public", "kernel"])
def find(request: pytest.FixtureRequest, device: torch.device) -> Callable[[str], Any]:
    """An operator by its name, as the runtime calls it or as the kernel's launch."""
    if request.param == "public":
        return lambda name: getattr(lora, name)
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return lambda name: getattr(lora, f"triton_{name}")


def add_lora(find: Callable[[str], Any], y: Any, x: Any, weights: Any, rows: Any) -> None:
    find("expand")(y, find("shrink")(x, weights, rows), weights, rows)


def stacked(
    num_slots: int, rank: int, inner: int, widths: tuple[int, ...], like: dict[str, Any]
) -> LoraWeights:
    a = torch.randn(num_slots, len(widths) * rank, inner).div_(inner**0.5).to(**like)
    b = torch.randn(num_slots, sum(widths), rank).div_(rank**0.5).to(**like)
    return LoraWeights(a, b, widths)


def batch(slots: list[int], num_active: int, device: torch.device) -> LoraRows:
    used = sorted(set(slots) - {NO_SLOT})
    active = used + [NOT_ACTIVE] * (num_active - len(used))
    as_int32 = {"dtype": torch.int32, "device": device}
    return LoraRows(torch.tensor(slots, **as_int32), torch.tensor(active, **as_int32))


def expected(
    y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, slots: list[int]
) -> torch.Tensor:
    """Row by row, in float64."""
    result, rank = y.double(), weights.rank
    for row, slot in enumerate(slots):
        if slot == NO_SLOT:
            continue
        end = 0
        for part, width in enumerate(weights.widths):
            columns = slice(end, end + width)
            end += width
            a = weights.a[slot, part * rank : (part + 1) * rank].double()
            result[row, columns] += weights.b[slot, columns].double() @ (a @ x[row].double())
    return result


@few
@given(
    slots=st.lists(st.integers(NO_SLOT, 3), min_size=1, max_size=70),
    inner=st.integers(1, 1100),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rank=st.sampled_from([16, 32, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    spare=st.integers(0, 2),
)
def test_each_row_has_its_adapter(
    find: Callable[[str], Any],
    device: torch.device,
    slots: list[int],
    inner: int,
    widths: list[int],
    rank: int,
    dtype: torch.dtype,
    spare: int,
) -> None:
    like = {"dtype": dtype, "device": device}
    weights = stacked(4, rank, inner, tuple(widths), like)
    x, y = (torch.randn(len(slots), width).to(**like) for width in (inner, sum(widths)))
    for unused in set(range(4)) - set(slots):  # they may hold anything finite
        weights.a[unused], weights.b[unused] = 1e4, 1e4
    rows = batch(slots, max(1, len(set(slots) - {NO_SLOT})) + spare, device)
    want = expected(y, x, weights, slots)
    before = y.clone()
    add_lora(find, y, x, weights, rows)
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    without = [row for row, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y[without], before[without])


@few
@given(
    slots=st.lists(st.integers(NO_SLOT, 2), min_size=1, max_size=70),
    inner=st.integers(1, 700),
    width=st.integers(1, 150),
    fused=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    spare=st.integers(0, 1),
)
def test_gated(
    find: Callable[[str], Any],
    device: torch.device,
    slots: list[int],
    inner: int,
    width: int,
    fused: bool,
    dtype: torch.dtype,
    spare: int,
) -> None:
    """Gate and up have adapters of their own, or one together (``fused``)."""
    like = {"dtype": dtype, "device": device}
    weights = stacked(3, 16, inner, (2 * width,) if fused else (width, width), like)
    x, y = (torch.randn(len(slots), columns).to(**like) for columns in (inner, 2 * width))
    rows = batch(slots, max(1, len(set(slots) - {NO_SLOT})) + spare, device)
    gate, up = expected(y, x, weights, slots).chunk(2, dim=1)
    got = find("expand_gated")(y.clone(), find("shrink")(x, weights, rows), weights, rows)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        got.double(), want, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
    )


def test_rows_of_x_may_have_strides(find: Callable[[str], Any], device: torch.device) -> None:
    like = {"dtype": torch.float32, "device": device}
    weights = stacked(2, 16, 40, (24,), like)
    wide = torch.randn(5, 100).to(device)
    for x in (wide[:, 3:43], wide[:, ::2][:, :40]):
        y, slots = torch.zeros(5, 24, **like), [0, NO_SLOT, 1, 1, 0]
        add_lora(find, y, x, weights, batch(slots, 2, device))
        want = expected(torch.zeros_like(y), x, weights, slots)
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


def test_a_replay_follows_the_rows(pool: GraphPool, device: torch.device) -> None:
    """The adapters of rows, and the weights of adapters, change between replays."""
    like = {"dtype": torch.float32, "device": device}
    weights = stacked(3, 16, 32, (8, 8), like)
    x, y = torch.randn(6, 32).to(device), torch.zeros(6, 16, **like)
    rows = batch([NO_SLOT] * 6, 2, device)

    def step() -> torch.Tensor:
        result = y.clone()
        lora.expand(result, lora.shrink(x, weights, rows), weights, rows)
        return result

    step()
    captured = pool.capture(step)
    for slots in ([0, 1, NO_SLOT, 0, 1, 1], [2] * 6, [NO_SLOT] * 6, [2, 0, 0, 0, 0, NO_SLOT]):
        weights.a.copy_(torch.randn(weights.a.shape))
        for buffer, values in zip(rows, batch(slots, 2, device), strict=True):
            buffer.copy_(values)
        pool.replay(captured.tape)
        want = expected(y, x, weights, slots)
        torch.testing.assert_close(captured.output.double(), want, rtol=1e-4, atol=1e-4)
