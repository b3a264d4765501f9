# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""LoRA's first GEMM, x @ A.T of each row's adapter: alone, beside the norm of x, and of one row.

A program serves one active adapter, one block of rows and a part of K. It computes all rows of the
block, which tensor cores do at no extra cost, and writes those of its adapter; without any it does
nothing. Results are partial sums, which the reader adds in a fixed order.

OVERLAP: indices and weights are loaded while the previous kernel is still running, all else when it
is done. Programs with nothing to do wait for it too: the next kernel waits for this one alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.gemm.triton.linear import prefetch


@triton.jit(do_not_specialize=["num_rows"])
def lora_shrink_kernel(
    x,
    a,
    slots,
    active,
    small,
    num_rows,
    x_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``small`` [SPLITS, T, PARTS, RANK] = x @ a.T of each row's adapter, over parts of K."""
    if OVERLAP:
        gdc_launch_dependents()
    block, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    split = tl.program_id(2)
    slot = tl.load(active + tl.program_id(0)).to(tl.int64)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots + m, mask=m < num_rows, other=-1) == slot
    has_rows = tl.max(mine.to(tl.int32), axis=0) > 0
    LENGTH: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    if OVERLAP:
        if SPLITS > 1:
            matrix = a + (slot * PARTS + part) * (RANK * K)
            prefetch(matrix, tl.where(has_rows, 0, RANK), split * LENGTH, RANK, K, RANK, LENGTH)
        gdc_wait()
    if has_rows:
        r = tl.arange(0, RANK)
        k = split * LENGTH + tl.arange(0, BLOCK_K)
        row = m.to(tl.int64)
        x_place = x + row[:, None] * x_stride + k[None, :]
        a_place = a + ((slot * PARTS + part) * RANK + r[None, :]) * K + k[:, None]
        total = tl.zeros((BLOCK_M, RANK), dtype=tl.float32)
        for start in range(0, LENGTH, BLOCK_K):
            there = k + start < K
            rows = tl.load(x_place + start, mask=mine[:, None] & there[None, :], other=0.0)
            columns = tl.load(a_place + start, mask=there[:, None], other=0.0)
            total = tl.dot(rows, columns, total, input_precision="ieee")
        place = small + ((split * num_rows + row[:, None]) * PARTS + part) * RANK + r[None, :]
        tl.store(place, total, mask=mine[:, None])


@triton.jit
def _normed_columns(a, norm_weight, k, K: tl.constexpr, RANK: tl.constexpr):
    """[BLOCK_K, RANK] of ``a`` times the norm's weight, which x then need not be."""
    r = tl.arange(0, RANK)[None, :]
    there = (k < K)[:, None]
    columns = tl.load(a + r * K + k[:, None], mask=there, other=0.0)
    # As many copies as columns: a vector alone would not be loaded ahead of its use.
    weight = tl.load(norm_weight + 0 * r + k[:, None], mask=there, other=0.0)
    return (columns.to(tl.float32) * weight.to(tl.float32)).to(a.dtype.element_ty)


@triton.jit
def _norm_row(
    x,
    norm_weight,
    normed,
    scales,
    row,
    x_stride,
    eps,
    K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As ``rms_norm_kernel``; 1 / rms goes to ``scales``."""
    d = tl.arange(0, triton.next_power_of_2(K))
    weight = tl.load(norm_weight + d, mask=d < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    values = tl.load(x + row * x_stride + d, mask=d < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
    result = (values * scale).to(normed.dtype.element_ty).to(tl.float32) * weight
    tl.store(normed + row * K + d, result.to(normed.dtype.element_ty), mask=d < K)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_rows", "num_active"])
def lora_norm_shrink_kernel(
    x,
    norm_weight,
    a,
    slots,
    active,
    small,
    normed,
    scales,
    eps,
    num_rows,
    x_stride,
    num_active,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """RMSNorm of x, and shrink of its result, for at most BLOCK_M rows, side by side.

    The first programs shrink x times the norm's weight. What is left, 1 / rms of a row, is a factor
    of the row's ``small``, which its reader applies: ``scales`` [T]. The last ``num_rows`` programs
    write the norm itself, [T, K].
    """
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    num_shrinks = num_active * (PARTS * SPLITS)
    if program >= num_shrinks:
        row = (program - num_shrinks).to(tl.int64)
        _norm_row(x, norm_weight, normed, scales, row, x_stride, eps, K, OVERLAP)
    else:
        LENGTH: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
        split, part = program % SPLITS, program // SPLITS % PARTS
        slot = tl.load(active + program // (SPLITS * PARTS)).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        mine = tl.load(slots + m, mask=m < num_rows, other=-1) == slot
        has_rows = tl.max(mine.to(tl.int32), axis=0) > 0
        matrix = a + (slot * PARTS + part) * (RANK * K)
        if OVERLAP:
            prefetch(matrix, tl.where(has_rows, 0, RANK), split * LENGTH, RANK, K, RANK, LENGTH)
            gdc_wait()
        if has_rows:
            row = m.to(tl.int64)
            total = tl.zeros((BLOCK_M, RANK), dtype=tl.float32)
            for start in range(0, LENGTH, BLOCK_K):
                k = split * LENGTH + start + tl.arange(0, BLOCK_K)
                there = mine[:, None] & (k < K)[None, :]
                rows = tl.load(x + row[:, None] * x_stride + k[None, :], mask=there, other=0.0)
                columns = _normed_columns(matrix, norm_weight, k, K, RANK)
                total = tl.dot(rows, columns, total, input_precision="ieee")
            r = tl.arange(0, RANK)
            place = small + ((split * num_rows + row[:, None]) * PARTS + part) * RANK + r[None, :]
            tl.store(place, total, mask=mine[:, None])


@triton.jit
def lora_shrink_row_kernel(
    x,
    norm_weight,
    a,
    slots,
    small,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of one row: ``small`` [splits, ROWS] = (x * norm_weight) @ a.T of its adapter's [ROWS, K].

    One program per BLOCK_R results and BLOCK_K inputs. ``norm_weight`` None: of x itself.
    """
    if OVERLAP:
        gdc_launch_dependents()
    slot = tl.load(slots).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = (k < K) & (slot >= 0)
    place = a + (slot * ROWS + r[:, None]) * K + k[None, :]
    matrix = tl.load(place, mask=there[None, :], other=0.0)
    if norm_weight is not None:
        weight = tl.load(norm_weight + k, mask=there, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
    if norm_weight is not None:
        v *= weight
    total = tl.sum(matrix.to(tl.float32) * v[None, :], axis=1)
    tl.store(small + tl.program_id(1) * ROWS + r, total, mask=(r < ROWS) & (slot >= 0))
