# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel: SiLU of the first half of each row, times the second half."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def silu_and_mul_kernel(
    gate_up,
    out,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK columns of ``out`` [T, width], which is contiguous."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    place = gate_up + row * row_stride
    gate = tl.load(place + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(place + width + column, mask=there, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=there)
