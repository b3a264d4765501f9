# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel: an activation of the first half of each row, times the second half."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.dependent_launch import wait_for_previous


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """``ops.activation.activate`` of float32 values."""
    tl.static_assert(
        ACTIVATION == "silu"
        or ACTIVATION == "gelu_tanh"
        or ACTIVATION == "gelu"
        or ACTIVATION == "relu2"
    )
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
        y = x * x
    else:
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def activate_and_mul_kernel(
    gate_up,
    out,
    row_stride,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK columns of ``out`` [T, width], which is contiguous."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    place = gate_up + row * row_stride
    gate = tl.load(place + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(place + width + column, mask=there, other=0.0).to(tl.float32)
    result = activated(gate, ACTIVATION) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=there)
