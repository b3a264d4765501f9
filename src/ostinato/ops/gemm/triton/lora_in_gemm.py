# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""What adapters add to a small-M GEMM, inside the GEMM's kernel: B of each row's adapter @ small.

``small`` [SPLITS, M, PARTS, RANK] holds x @ A.T of each row's adapter in partial sums, and nothing
in rows without one. All columns of a tile belong to one part.

``LORA`` is a tuple of constants: RANK, SPLITS, PARTS, the first columns of the second and the third
part (a part that does not exist begins at the end), the adapters of a group, and whether a program
may have more than one group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part(first, GATED: tl.constexpr, LORA: tl.constexpr):
    """The part that column ``first`` belongs to. Gate is the first part, or half of it."""
    if GATED:
        return 0
    return (first >= LORA[3]).to(tl.int32) + (first >= LORA[4]).to(tl.int32)


# --- one row --------------------------------------------------------------------------------------


@triton.jit
def row_columns(b, slots, n, there, ROWS: tl.constexpr, LORA: tl.constexpr):
    """Rows ``n`` of the only row's B [ROWS, RANK], repeated for every split; [BLOCK_N, k].

    Zeros if the row has no adapter. With the repetition, one sum over k adds up splits and ranks.
    """
    RANK: tl.constexpr = LORA[0]
    slot = tl.load(slots)
    k = tl.arange(0, triton.next_power_of_2(LORA[1]) * RANK)
    place = b + (slot.to(tl.int64) * ROWS + n[:, None]) * RANK + (k % RANK)[None, :]
    return tl.load(place, mask=there & (slot >= 0), other=0.0)


@triton.jit
def row_parts(small, slots, first, half, GATED: tl.constexpr, LORA: tl.constexpr):
    """[k]: the partial sums for the columns from ``first``; ``half`` 1: those of up."""
    RANK: tl.constexpr = LORA[0]
    PARTS: tl.constexpr = LORA[2]
    part = _part(first, GATED, LORA)
    if PARTS == 2:
        part += half
    k = tl.arange(0, triton.next_power_of_2(LORA[1]) * RANK)
    split = k // RANK
    place = small + (split * PARTS + part) * RANK + k % RANK
    return tl.load(place, mask=(split < LORA[1]) & (tl.load(slots) >= 0), other=0.0)


@triton.jit
def expand_row(columns, parts):
    """[BLOCK_N] of ``row_columns`` and ``row_parts``."""
    return tl.sum(columns.to(tl.float32) * parts[None, :], axis=1)


# --- several rows ---------------------------------------------------------------------------------


@triton.jit
def group_columns(b, active, num_active, group, n, there, ROWS: tl.constexpr, LORA: tl.constexpr):
    """[BLOCK_N, GROUP * RANK]: rows ``n`` of every B [ROWS, RANK] in a group of active adapters."""
    RANK: tl.constexpr = LORA[0]
    GROUP: tl.constexpr = LORA[5]
    k = tl.arange(0, GROUP * RANK)
    index = group * GROUP + k // RANK
    slot = tl.load(active + index, mask=index < num_active, other=-1)
    slot = tl.max_constancy(slot, RANK)  # so that rows are read in long pieces
    place = b + (slot.to(tl.int64)[None, :] * ROWS + n[:, None]) * RANK + (k % RANK)[None, :]
    return tl.load(place, mask=there & (slot >= 0)[None, :], other=0.0)


@triton.jit
def _sum_of_splits(small, scales, row_slots, part, M, BLOCK_M: tl.constexpr, LORA: tl.constexpr):
    """[RANK, BLOCK_M] of a part; zeros for rows without an adapter."""
    RANK: tl.constexpr = LORA[0]
    SPLITS: tl.constexpr = LORA[1]
    PARTS: tl.constexpr = LORA[2]
    m = tl.arange(0, BLOCK_M)
    wanted = (row_slots >= 0)[None, :]
    place = small + (m[None, :] * PARTS + part) * RANK + tl.arange(0, RANK)[:, None]
    total = tl.load(place, mask=wanted, other=0.0)
    for split in tl.static_range(1, SPLITS):  # unrolled, so that all loads are in flight at once
        total += tl.load(place + split * (M * PARTS * RANK), mask=wanted, other=0.0)
    if scales is not None:
        total *= tl.load(scales + m, mask=row_slots >= 0, other=0.0)[None, :]
    return total


@triton.jit
def group_slots(active, num_active, group, LORA: tl.constexpr):
    """[GROUP]: the slots of a group of active adapters."""
    index = group * LORA[5] + tl.arange(0, LORA[5])
    return tl.load(active + index, mask=index < num_active, other=-2)


@triton.jit
def _group_rows(total, row_slots, its_slots, LORA: tl.constexpr):
    """[GROUP * RANK, BLOCK_M]: ``total`` of a row where its adapter's columns are, else zeros."""
    mine = its_slots[:, None, None] == row_slots[None, None, :]
    rows = tl.where(mine, total[None, :, :], 0.0)
    return tl.reshape(rows, (LORA[5] * LORA[0], total.shape[1]))


@triton.jit
def _expand_groups(
    columns,
    its_slots,
    total,
    row_slots,
    b,
    active,
    num_active,
    n,
    there,
    ROWS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LORA: tl.constexpr,
):
    """The sums [BLOCK_N, BLOCK_M] of rows ``n`` of B, over this program's groups of adapters."""
    sums = tl.zeros([n.shape[0], total.shape[1]], dtype=tl.float32)
    # A loop even where there is at most one group: in straight-line code, operands would keep their
    # shared memory until the GEMM that adds to these sums is done.
    for group in tl.range(tl.program_id(1), tl.cdiv(num_active, LORA[5]), SPLIT_K, num_stages=1):
        rows = _group_rows(total, row_slots, its_slots, LORA)
        sums = tl.dot(columns, rows.to(columns.dtype), sums, input_precision="ieee")
        if LORA[6]:
            later = group + SPLIT_K
            its_slots = group_slots(active, num_active, later, LORA)
            columns = group_columns(b, active, num_active, later, n, there, ROWS, LORA)
    return sums


@triton.jit
def expand_tile(
    columns,
    up_columns,
    row_slots,
    its_slots,
    b,
    small,
    scales,
    active,
    num_active,
    n,
    there,
    first,
    M,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LORA: tl.constexpr,
):
    """The sums [BLOCK_N, BLOCK_M] of this program's groups, and those of up.

    Groups are shared out among the SPLIT_K programs of a tile. ``columns``, ``up_columns`` and
    ``its_slots`` are of the first one: the caller loads them, and the slots of rows, before it
    waits for ``small``.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    part = _part(first, GATED, LORA)
    total = _sum_of_splits(small, scales, row_slots, part, M, BLOCK_M, LORA)
    sums = _expand_groups(
        columns, its_slots, total, row_slots, b, active, num_active, n, there, ROWS, SPLIT_K, LORA
    )
    up_sums = sums
    if GATED:
        # Not in the same loop: on an H200 that was wrong for some tiles, in a branch too, unless
        # ptxas did not optimise. The likely cause: the descriptors of both products' operands
        # need more uniform registers than there are.
        if LORA[2] == 2:
            total = _sum_of_splits(small, scales, row_slots, 1, M, BLOCK_M, LORA)
        up_sums = _expand_groups(
            up_columns,
            its_slots,
            total,
            row_slots,
            b,
            active,
            num_active,
            n + N,
            there,
            ROWS,
            SPLIT_K,
            LORA,
        )
    return sums, up_sums
