# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel: RMSNorm of rows, optionally adding a residual first.

The input may be given as several parts to be summed.

OVERLAP: weights are loaded while the previous kernel is still running, all else when it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    x_part_stride,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row. Row r of an input is at [r // INNER, r % INNER]; results are contiguous.

    ``residual`` None: the norm of ``x`` alone, and ``total`` is not written.
    """
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    outer, inner = row // INNER, row % INNER
    d = tl.arange(0, DIM_PAD)
    there = d < DIM
    w = tl.load(weight + d, mask=there, other=0.0)
    if OVERLAP:
        gdc_wait()
    place = x + outer * x_outer_stride + inner * x_inner_stride
    values = tl.load(place + d, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(place + part * x_part_stride + d, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + outer * residual_outer_stride + inner * residual_inner_stride
        values += tl.load(place + d, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * DIM + d, rounded, mask=there)
        values = rounded.to(tl.float32)  # normalize the rounded sum, which the next layer reads
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * DIM + d, normed.to(out.dtype.element_ty), mask=there)
