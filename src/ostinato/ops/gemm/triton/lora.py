# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""LoRA's second GEMM, expand, for rows of different adapters, after the GEMM that it adds to.

Small-M GEMMs expand in their own kernels (``lora_in_gemm``).

A program serves one active adapter and one block of rows. It computes all rows of the block, which
tensor cores do at no extra cost, and writes those of its adapter; without any it does nothing.

OVERLAP: indices and weights are loaded while the previous kernel is still running, all else when it
is done. Programs with nothing to do wait for it too: the next kernel waits for this one alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LARGE_TILE = tl.constexpr(4096)  # values of a tile of small results


@triton.jit
def _sum_of_splits(
    small,
    row,
    wanted,
    part,
    num_rows,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """[BLOCK_M, RANK] of a part; zeros for rows that are not ``wanted``."""
    place = small + (row[:, None] * PARTS + part) * RANK + tl.arange(0, RANK)[None, :]
    total = tl.load(place, mask=wanted[:, None], other=0.0)
    step = num_rows * PARTS * RANK
    if RANK <= 64 or row.shape[0] * RANK < LARGE_TILE:  # all splits are in flight at once
        for split in tl.static_range(1, SPLITS):
            total += tl.load(place + split * step, mask=wanted[:, None], other=0.0)
    else:  # they would not fit into registers
        for split in tl.range(1, SPLITS, loop_unroll_factor=3):
            total += tl.load(place + split * step, mask=wanted[:, None], other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def lora_expand_kernel(
    y,
    b,
    slots,
    active,
    small,
    num_rows,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_1: tl.constexpr,
    COLUMN_2: tl.constexpr,
    TILE_1: tl.constexpr,
    TILE_2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y [T, N] += ``small``, summed over SPLITS, @ b.T of each row's adapter.

    A tile has BLOCK_N columns of one part.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    slot = tl.load(active + tl.program_id(1)).to(tl.int64)
    second, third = tile >= TILE_1, tile >= TILE_2  # a part that does not exist begins at the end
    part = second.to(tl.int32) + third.to(tl.int32)
    end = tl.where(third, N, tl.where(second, COLUMN_2, COLUMN_1))
    start = (tile - tl.where(third, TILE_2, tl.where(second, TILE_1, 0))) * BLOCK_N
    start += tl.where(third, COLUMN_2, tl.where(second, COLUMN_1, 0))
    n = start + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots + m, mask=m < num_rows, other=-1) == slot
    b_place = b + (slot * N + n[None, :]) * RANK + r[:, None]
    columns = tl.load(b_place, mask=(n < end)[None, :] & (slot >= 0), other=0.0)
    has_rows = tl.max(mine.to(tl.int32), axis=0) > 0
    if OVERLAP:
        gdc_wait()
    if has_rows:
        row = m.to(tl.int64)
        y_place = y + row[:, None] * N + n[None, :]
        written = mine[:, None] & (n < end)[None, :]
        # Loaded here, so that the end does not wait for it.
        result = tl.load(y_place, mask=written, other=0.0).to(tl.float32)
        total = _sum_of_splits(small, row, mine, part, num_rows, PARTS, RANK, SPLITS)
        total = total.to(b.dtype.element_ty)
        result = tl.dot(total, columns, result, input_precision="ieee")
        tl.store(y_place, result.to(y.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_rows", "num_active"])
def lora_expand_gated_kernel(
    gate_up,
    b,
    slots,
    active,
    small,
    out,
    num_rows,
    num_active,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``out`` [T, WIDTH] = SiLU of gate times up, after expand of both halves of ``gate_up``.

    Gate and up are two parts, or halves of one. The last program in dimension 1 serves the rows
    without an adapter.
    """
    if OVERLAP:
        gdc_launch_dependents()
    number = tl.program_id(1)
    slot = tl.load(active + number, mask=number < num_active, other=-1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = (tl.load(slots + m, mask=m < num_rows, other=-2) == slot) & (m < num_rows)
    b_place = b + (slot * 2 * WIDTH + n[None, :]) * RANK + r[:, None]
    weighted = (n < WIDTH)[None, :] & (slot >= 0)
    gate_columns = tl.load(b_place, mask=weighted, other=0.0)
    up_columns = tl.load(b_place + WIDTH * RANK, mask=weighted, other=0.0)
    has_rows = tl.max(mine.to(tl.int32), axis=0) > 0
    if OVERLAP:
        gdc_wait()
    if has_rows:
        row = m.to(tl.int64)
        place = gate_up + row[:, None] * 2 * WIDTH + n[None, :]
        written = mine[:, None] & (n < WIDTH)[None, :]
        gate = tl.load(place, mask=written, other=0.0).to(tl.float32)
        up = tl.load(place + WIDTH, mask=written, other=0.0).to(tl.float32)
        if slot >= 0:
            total = _sum_of_splits(small, row, mine, 0, num_rows, PARTS, RANK, SPLITS)
            total = total.to(b.dtype.element_ty)
            gate = tl.dot(total, gate_columns, gate, input_precision="ieee")
            if PARTS == 2:
                total = _sum_of_splits(small, row, mine, 1, num_rows, PARTS, RANK, SPLITS)
                total = total.to(b.dtype.element_ty)
            up = tl.dot(total, up_columns, up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        place = out + row[:, None] * WIDTH + n[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=written)
