# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Small-M GEMMs, fused with the operations before and after them.

y = x @ weight.T + bias, then ACTIVATION(gate) * up of its two halves if GATED, then + residual.
Two kernels: ``row_kernel`` for one row, without tensor cores, and ``tile_kernel`` for up to BLOCK_M
rows, on tensor cores, with the weight as the large operand. Both are bound by reading the weight
once; everything else is arranged around that. Sums are in float32.

``row_kernel`` fuses a norm of x at no extra pass: 1 / rms is a factor of the result, so the GEMM
runs on x * norm_weight while the squares of x are summed, and the result is scaled at the end. For
several rows this was measured to be slower than a separate norm kernel: tensor cores take their
operands from shared memory, and the norm would have to write them back there.

OVERLAP: weights, which no kernel writes, are requested before ``gdc_wait``; all else comes after.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.gemm.triton.lora_in_gemm import (
    expand_row,
    expand_tile,
    group_columns,
    group_slots,
    row_columns,
    row_parts,
)
from ostinato.ops.triton.activation import activated

# Each thread prefetches one row: $1 first byte, $2 rows, $3 bytes between rows, $4 bytes per row.
_PREFETCH_ROWS = tl.constexpr(
    """{
    .reg .pred mine;
    .reg .u32 row;
    .reg .u64 start;
    mov.u32 row, %tid.x;
    setp.lt.s32 mine, row, $2;
    mad.wide.u32 start, row, $3, $1;
    @mine cp.async.bulk.prefetch.L2.global [start], $4;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def prefetch(weight, row, begin, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH):
    """Prefetch [ROWS, WIDTH] of ``weight`` from (row, begin) into L2, within its bounds.

    The hardware takes multiples of 16 bytes; other matrices are read when needed.
    """
    BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if (K * BYTES) % 16 == 0:
        width = tl.minimum(WIDTH, K - begin)
        rows = tl.where(width > 0, tl.minimum(ROWS, N - row), 0)
        start = (weight + row.to(tl.int64) * K + begin).to(tl.int64)
        tl.inline_asm_elementwise(
            _PREFETCH_ROWS,
            "=r,l,r,r,r",
            [start, rows, K * BYTES, width * BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _weights(tile, there, k, K: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """A tile of the weight, which is read once and should not evict other data."""
    if MASKED:
        mask = there & (k < K)[None, :]
        return tl.load(tile, mask=mask, other=0.0, eviction_policy=EVICT)
    return tl.load(tile, eviction_policy=EVICT)


@triton.jit
def _vector(pointer, k, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + k, mask=k < K, other=0.0)
    return tl.load(pointer + k)


@triton.jit
def row_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    lora_b,
    small,
    slots,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    LORA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_N results (of N, half the weight's rows if GATED).

    Blocks of the weight are loaded one ahead of their use, the first before ``gdc_wait``; up to
    PREFETCH more are prefetched into L2 there. ``lora_b``: adapters are added, of which ``small``
    has what came from x * norm_weight, as it is without 1 / rms.
    """
    if OVERLAP:
        gdc_launch_dependents()
    MASKED: tl.constexpr = (N % BLOCK_N != 0) or (K % BLOCK_K != 0)
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (n < N)[:, None]
    tile = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    w = _weights(tile, there, k, K, MASKED, EVICT)
    if GATED:
        up_tile = tile + N * K
        up_w = _weights(up_tile, there, k, K, MASKED, EVICT)
    if norm_weight is not None:
        g = _vector(norm_weight, k, K, MASKED)
    if bias is not None:
        bias_n = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up_bias_n = tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    if OVERLAP and PREFETCH > 0 and LAST > 0:
        prefetch(weight, first, BLOCK_K, N, K, BLOCK_N, PREFETCH * BLOCK_K)
        if GATED:
            prefetch(weight, first + N, BLOCK_K, 2 * N, K, BLOCK_N, PREFETCH * BLOCK_K)
    if lora_b is not None:
        ROWS: tl.constexpr = 2 * N if GATED else N
        lora_w = row_columns(lora_b, slots, n, there, ROWS, LORA)
        if GATED:
            lora_up_w = row_columns(lora_b, slots, n + N, there, ROWS, LORA)
    if OVERLAP:
        gdc_wait()
    v = _vector(x, k, K, MASKED)
    if residual is not None:  # loaded here, so that the end does not wait for it
        residual_n = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    if lora_b is not None:
        lora_v = row_parts(small, slots, first, 0, GATED, LORA)
        if GATED:
            lora_up_v = row_parts(small, slots, first, 1, GATED, LORA)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, LAST, BLOCK_K):
        ahead = start + BLOCK_K + k
        next_w = _weights(tile + start + BLOCK_K, there, ahead, K, MASKED, EVICT)
        if GATED:
            next_up_w = _weights(up_tile + start + BLOCK_K, there, ahead, K, MASKED, EVICT)
        next_v = _vector(x, ahead, K, MASKED)
        v = v.to(tl.float32)
        if norm_weight is not None:
            next_g = _vector(norm_weight, ahead, K, MASKED)
            squares += v * v
            v *= g.to(tl.float32)
            g = next_g
        sums += w.to(tl.float32) * v[None, :]
        if GATED:
            up_sums += up_w.to(tl.float32) * v[None, :]
            up_w = next_up_w
        w, v = next_w, next_v
    v = v.to(tl.float32)
    if norm_weight is not None:
        squares += v * v
        v *= g.to(tl.float32)
    y = tl.sum(sums + w.to(tl.float32) * v[None, :], axis=1)
    up = y
    if GATED:
        up = tl.sum(up_sums + up_w.to(tl.float32) * v[None, :], axis=1)
    if lora_b is not None:
        y += expand_row(lora_w, lora_v)
        if GATED:
            up += expand_row(lora_up_w, lora_up_v)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        up *= scale
    if bias is not None:
        y += bias_n
        if GATED:
            up += up_bias_n
    if GATED:
        y = activated(y, ACTIVATION) * up
    if residual is not None:
        y += residual_n
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _inputs(x, m, k, M, x_stride, K: tl.constexpr, MASKED: tl.constexpr):
    """A block of x as the second operand: [k, m]."""
    there = (m < M)[None, :]
    if MASKED:
        there = there & (k < K)[:, None]
    place = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    return tl.load(place, mask=there, other=0.0)


@triton.jit(do_not_specialize=["M", "num_active"])
def tile_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    counters,
    lora_b,
    small,
    scales,
    slots,
    active,
    M,
    x_stride,
    residual_stride,
    num_active,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    LORA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_N results of all M rows (at most BLOCK_M) and part of K.

    With SPLIT_K every program writes its sums to ``partial`` [tiles, SPLIT_K, 1 or 2, BLOCK_N,
    BLOCK_M], and the last program of a tile to arrive adds them in a fixed order.
    ``counters`` [tiles] must be 0. ``lora_b``: adapters are added (``lora_in_gemm``), before the
    weight: while a program waits for ``small``, what it prefetched of the weight arrives.
    """
    NUM_BLOCKS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    MASKED_K: tl.constexpr = NUM_BLOCKS * BLOCK_K * SPLIT_K != K
    MASKED: tl.constexpr = (N % BLOCK_N != 0) or MASKED_K
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * (NUM_BLOCKS * BLOCK_K)
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    there = (n < N)[:, None]
    if OVERLAP and PREFETCH > 0:
        WIDTH: tl.constexpr = (PREFETCH if PREFETCH < NUM_BLOCKS else NUM_BLOCKS) * BLOCK_K
        prefetch(weight, first, begin, N, K, BLOCK_N, WIDTH)
        if GATED:
            prefetch(weight, first + N, begin, 2 * N, K, BLOCK_N, WIDTH)
    if lora_b is not None:
        ROWS: tl.constexpr = 2 * N if GATED else N
        group = tl.program_id(1)
        row_slots = tl.load(slots + m, mask=m < M, other=-1)
        its_slots = group_slots(active, num_active, group, LORA)
        lora_w = group_columns(lora_b, active, num_active, group, n, there, ROWS, LORA)
        lora_up_w = lora_w
        if GATED:
            lora_up_w = group_columns(lora_b, active, num_active, group, n + N, there, ROWS, LORA)
    if OVERLAP:
        gdc_wait()
        # Later than in other kernels: earlier was measured to take up to a third more time. These
        # programs are few and large, and a second waiting kernel makes SM occupancy uneven.
        gdc_launch_dependents()
    rows = m.to(tl.int64)[None, :]
    results = there & (m < M)[None, :]
    if residual is not None:  # loaded here, so that the end does not wait for it
        place = residual + rows * residual_stride + n[:, None]
        residual_n = tl.load(place, mask=results, other=0.0)

    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if lora_b is not None:
        sums, up_sums = expand_tile(
            lora_w,
            lora_up_w,
            row_slots,
            its_slots,
            lora_b,
            small,
            scales,
            active,
            num_active,
            n,
            there,
            first,
            M,
            N,
            GATED,
            BLOCK_M,
            SPLIT_K,
            LORA,
        )
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        k = begin + block * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = weight + n.to(tl.int64)[:, None] * K + k[None, :]
        v = _inputs(x, m, k, M, x_stride, K, MASKED_K)
        w = _weights(tile, there, k, K, MASKED, EVICT)
        sums = tl.dot(w, v, sums, input_precision="ieee")
        if GATED:
            up_w = _weights(tile + N * K, there, k, K, MASKED, EVICT)
            up_sums = tl.dot(up_w, v, up_sums, input_precision="ieee")

    if SPLIT_K > 1:
        PARTS: tl.constexpr = 2 if GATED else 1
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        home = tl.program_id(0) * SPLIT_K
        mine = home + tl.program_id(1)
        place = partial + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(place + mine * (PARTS * SIZE), sums)
        if GATED:
            tl.store(place + mine * (PARTS * SIZE) + SIZE, up_sums)
        tl.debug_barrier()  # all threads have stored before one of them signals it
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived != SPLIT_K - 1:
            return
        sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for part in tl.static_range(SPLIT_K):  # unrolled, so that all loads are in flight at once
            at = (home + part) * (PARTS * SIZE)
            sums += tl.load(place + at, cache_modifier=".cg")
            if GATED:
                up_sums += tl.load(place + at + SIZE, cache_modifier=".cg")

    y, up = sums, up_sums
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = activated(y, ACTIVATION) * up
    if residual is not None:
        y += residual_n.to(tl.float32)
    tl.store(out + rows * N + n[:, None], y.to(out.dtype.element_ty), mask=results)
