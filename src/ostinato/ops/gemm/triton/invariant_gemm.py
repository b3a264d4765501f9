# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""A GEMM whose every result has the same bits whatever rows are computed with it.

y = x @ weight.T + bias, then ACTIVATION(gate) * up of its two halves if GATED, then + residual.

Hopper's tensor cores add 16 products to a float32 sum at a time. A result is the sum over its inner
dimension in that order, from first to last: there is no split-K. Everything else about a tile (its
rows, its stages, which operand comes first) decides when a sum is computed, not its order. Nothing
is contracted into fused multiply-adds that the source does not state: launch with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.triton.activation import activated


@triton.jit
def _tile(
    operand,
    first,
    k,
    count,
    stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BULK: tl.constexpr,
    EVICT: tl.constexpr,
):
    """[ROWS, BLOCK_K] of an operand from (first, k); zeros outside of [count, K]."""
    if BULK:
        tile = operand.load([first, k])
    else:
        row = first + tl.arange(0, ROWS)
        column = k + tl.arange(0, BLOCK_K)
        there = (row < count)[:, None]
        if K % BLOCK_K != 0:
            there = there & (column < K)[None, :]
        place = operand + row.to(tl.int64)[:, None] * stride + column[None, :]
        tile = tl.load(place, mask=there, other=0.0, eviction_policy=EVICT)
    return tile


@triton.jit
def _dot(w, x, sums, SWAP: tl.constexpr):
    if SWAP:
        sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["M"])
def invariant_gemm_kernel(
    x,
    weight,
    out,
    bias,
    residual,
    M,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_M rows and BLOCK_N results (of N, half the weight's rows if GATED).

    BULK: ``x`` and ``weight`` are descriptors, of tiles [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K].
    SWAP: rows of the weight are the first operand of the tensor core, else rows of ``x``.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    num_m = tl.cdiv(M, BLOCK_M)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    # GROUP tiles of the weight stay in L2 while all rows pass.
    first_n = tile // (GROUP * num_m) * GROUP
    wide = tl.minimum(num_n - first_n, GROUP)
    rest = tile % (GROUP * num_m)
    n_first = (first_n + rest % wide) * BLOCK_N
    m_first = rest // wide * BLOCK_M
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    m = m_first + tl.arange(0, BLOCK_M)
    n = n_first + tl.arange(0, BLOCK_N)
    if SWAP:
        m, n = m[None, :], n[:, None]
        zeros = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        m, n = m[:, None], n[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)

    y, up = zeros, zeros
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        rows = _tile(x, m_first, k, M, x_stride, BLOCK_M, K, BLOCK_K, BULK, "evict_last")
        w = _tile(weight, n_first, k, ROWS, K, BLOCK_N, K, BLOCK_K, BULK, "evict_first")
        y = _dot(w, rows, y, SWAP)
        if GATED:
            w = _tile(weight, n_first + N, k, ROWS, K, BLOCK_N, K, BLOCK_K, BULK, "evict_first")
            up = _dot(w, rows, up, SWAP)

    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = activated(y, ACTIVATION) * up
    results = (m < M) & (n < N)
    wide_m = m.to(tl.int64)
    if residual is not None:
        place = residual + wide_m * residual_stride + n
        y += tl.load(place, mask=results, other=0.0).to(tl.float32)
    tl.store(out + wide_m * N + n, y.to(out.dtype.element_ty), mask=results)
