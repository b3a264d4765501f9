# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Norms of rows, one kernel each: RMSNorm or LayerNorm, optionally adding a residual first; and the
RMSNorm of a sublayer's result, added to the residual, followed by the next RMSNorm.

The input may be given as several parts to be summed.

OVERLAP: weights are loaded while the previous kernel is still running, all else when it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rms_normed(values, weight, eps, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """The norm of float32 ``values``, in DTYPE. A float32 weight multiplies unrounded values."""
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
    if weight.dtype == DTYPE:
        normed = normed.to(DTYPE).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(DTYPE)


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
    normed = _rms_normed(values, w, eps, DIM, out.dtype.element_ty)
    tl.store(out + row * DIM + d, normed, mask=there)


@triton.jit
def output_norm_kernel(
    x,
    residual,
    output_weight,
    weight,
    out,
    total,
    output_eps,
    eps,
    x_stride,
    residual_stride,
    x_part_stride,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: ``total`` = residual + norm of x; ``out`` = the second norm of that.

    ``weight`` None: there is no second norm, and ``out`` is not written.
    """
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    there = d < DIM
    output_w = tl.load(output_weight + d, mask=there, other=0.0)
    if weight is not None:
        w = tl.load(weight + d, mask=there, other=0.0)
    if OVERLAP:
        gdc_wait()
    place = x + row * x_stride + d
    values = tl.load(place, mask=there, other=0.0).to(tl.float32)
    stream = tl.load(residual + row * residual_stride + d, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(place + part * x_part_stride, mask=there, other=0.0).to(tl.float32)
    normed = _rms_normed(values, output_w, output_eps, DIM, total.dtype.element_ty)
    rounded = (stream + normed.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * DIM + d, rounded, mask=there)
    if weight is not None:
        normed = _rms_normed(rounded.to(tl.float32), w, eps, DIM, out.dtype.element_ty)
        tl.store(out + row * DIM + d, normed, mask=there)


@triton.jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    eps,
    x_stride,
    residual_stride,
    x_part_stride,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row. ``residual`` None: the norm of x alone, and ``total`` is not written."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    there = d < DIM
    w = tl.load(weight + d, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + d, mask=there, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    place = x + row * x_stride + d
    values = tl.load(place, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(place + part * x_part_stride, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * residual_stride + d, mask=there, other=0.0).to(
            tl.float32
        )
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * DIM + d, rounded, mask=there)
        values = rounded.to(tl.float32)  # normalize the rounded sum, which the next layer reads
    values = tl.where(there, values - tl.sum(values, axis=0) / DIM, 0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps) * w
    if bias is not None:
        normed += b
    tl.store(out + row * DIM + d, normed.to(out.dtype.element_ty), mask=there)
