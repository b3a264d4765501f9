"""Launching a kernel from what is known of earlier launches, against plain arithmetic in torch.

What Triton compiles a variant for changes from launch to launch: types, addresses that are round or
not, numbers that are 1 or multiples of 16, arguments that are None.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

if torch.cuda.is_available():
    import triton
    import triton.language as tl

    from ostinato.ops.triton import launch as module
    from ostinato.ops.triton.launch import launch

    @triton.jit
    def scaled_sum_kernel(  # type: ignore[no-untyped-def]
        x,
        y,
        out,
        factor,
        count,
        stride,
        WIDTH: tl.constexpr,  # noqa: N803
        DOUBLED: tl.constexpr,  # noqa: N803
    ):
        """out[i] = factor * x[i * stride] + y[i], twice that if DOUBLED; ``y`` may be None."""
        i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        there = i < count
        total = tl.load(x + i * stride, mask=there, other=0).to(tl.float32) * factor
        if y is not None:
            total += tl.load(y + i, mask=there, other=0).to(tl.float32)
        if DOUBLED:
            total *= 2
        tl.store(out + i, total, mask=there)


def run(
    x: torch.Tensor,
    y: torch.Tensor | None,
    factor: Any,
    count: int,
    stride: int,
    *,
    width: int = 32,
    doubled: bool = False,
) -> torch.Tensor:
    out = torch.full((count,), torch.nan, device="cuda")
    grid = (-(-count // width),)
    launch(
        scaled_sum_kernel,
        grid,
        (x, y, out),
        (factor, count, stride),
        WIDTH=width,
        DOUBLED=doubled,
        num_warps=1,
    )
    return out


def expected(
    x: torch.Tensor, y: torch.Tensor | None, factor: Any, count: int, stride: int, doubled: bool
) -> torch.Tensor:
    total = factor * x[: count * stride : stride].float()
    total = total if y is None else total + y[:count].float()
    return 2 * total if doubled else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_every_variant_is_found_again(dtype: torch.dtype) -> None:
    values = torch.arange(2048, device="cuda").to(dtype)
    others = torch.arange(0, 4096, 2, device="cuda").to(torch.float32)
    strides, offsets, counts = (1, 2, 16, 17), (0, 1, 16), (1, 16, 33)
    for _ in range(2):  # the second time everything is known
        for stride, offset, count, with_y, doubled in product(
            strides, offsets, counts, (True, False), (True, False)
        ):
            x, y = values[offset:], others[offset:] if with_y else None
            got = run(x, y, 0.5, count, stride, doubled=doubled)
            assert torch.equal(got, expected(x, y, 0.5, count, stride, doubled))
    before = len(module._variants)
    assert before > 0
    got = run(torch.ones(64, device="cuda", dtype=dtype), None, 0.5, 33, 1)
    assert len(module._variants) == before, "new tensors of a known kind are nothing new"
    assert torch.equal(got, torch.full((33,), 0.5, device="cuda"))


def test_whole_numbers_and_fractions_that_are_equal() -> None:
    x = torch.arange(64, device="cuda", dtype=torch.float32)
    for factor in (1, 1.0, 2.0, 2, True):
        assert torch.equal(run(x, None, factor, 33, 1), x[:33] * float(factor))


def test_a_tensor_on_the_cpu_is_refused() -> None:
    x = torch.ones(64, device="cuda")
    run(x, None, 1.0, 33, 1)
    with pytest.raises(ValueError, match="cpu tensor"):
        run(x.cpu(), None, 1.0, 33, 1)
    with pytest.raises(ValueError, match="cpu tensor"):
        run(x, x.cpu(), 1.0, 33, 1)


def test_in_a_graph_and_on_another_stream() -> None:
    x = torch.arange(64, device="cuda", dtype=torch.float32)
    out = run(x, None, 3.0, 33, 1)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(x, None, 3.0, 33, 1)
    x += 1
    graph.replay()
    assert torch.equal(captured, out + 3)


def test_hooks_see_every_launch() -> None:
    x = torch.arange(64, device="cuda", dtype=torch.float32)
    seen: list[object] = []
    run(x, None, 4.0, 33, 1)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        run(x, None, 4.0, 33, 1)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_VARIANTS", 4)
    monkeypatch.setattr(module, "_variants", {})
    x = torch.arange(640, device="cuda", dtype=torch.float32)
    for count in range(2, 30):
        assert torch.equal(run(x, None, 1.0, count, 1), x[:count])
        assert len(module._variants) <= 4
