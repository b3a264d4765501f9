# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""GEMMs of 2 to 16 rows whose weight goes from memory straight to the tensor cores' registers.

A tensor core wants each thread to hold certain elements of its operands, and shared memory is how
they usually get there. But the order of the inner dimension is free as long as both operands agree:
here every thread holds 8 neighbours of a row of the weight and the same 8 of a row of x, each a
single load of 16 bytes (``k_width`` of the operands' layout). So a program keeps its part of the
weight in flight in registers, as ``row_kernel`` does for one row, and starts and ends as quickly.
The warps of a program share the inner dimension; their sums meet in shared memory, in a fixed
order.

The norm is fused as in ``row_kernel``: 1 / rms is a factor of the result. x * norm_weight is
rounded to x's dtype, so it must be one with the range of float32.

Written in Gluon, Triton's language of explicit layouts, and so tested on the GPU only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.triton.activation import activated

_activated = gluon.jit(activated.fn)  # the same source, compiled by Gluon


@gluon.jit
def _weights(tile, there, MASKED: gl.constexpr, EVICT: gl.constexpr):
    if MASKED:
        return gl.load(tile, mask=there, other=0.0, eviction_policy=EVICT)
    return gl.load(tile, eviction_policy=EVICT)


@gluon.jit
def _outer(values, first: gl.constexpr, second: gl.constexpr):
    """A vector as a tensor of three dimensions: two new ones are inserted."""
    return gl.expand_dims(gl.expand_dims(values, first), second)


@gluon.jit
def _squares(values):
    """Squares of [warps, k, m], with the 8 neighbours of a row that a thread holds added up.

    Without that a program takes 143 instead of 125 registers if gated (190 instead of 153 with long
    pieces of a row), and an SM has room for one program less.
    """
    WARPS: gl.constexpr = values.shape[0]
    INPUTS: gl.constexpr = values.shape[1]
    ROWS: gl.constexpr = values.shape[2]
    return gl.sum(gl.reshape(values * values, [WARPS, INPUTS // 8, 8, ROWS]), axis=2)


@gluon.jit(do_not_specialize=["M"])
def mma_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    M,
    x_stride,
    residual_stride,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EVICT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program per BLOCK_N results (of N, half the weight's rows if GATED) of all M rows.

    M is at most BLOCK_M, 8 or 16. A step of the loop takes BLOCK_K inputs per warp, which are
    loaded one step ahead; those of the first step before ``gdc_wait``.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    # [warps, BLOCK_N, BLOCK_M]: each warp has sums of its own.
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NUM_WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    w_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, k_width=8)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, k_width=8)
    STEP: gl.constexpr = NUM_WARPS * BLOCK_K
    MASKED_K: gl.constexpr = K % STEP != 0
    MASKED: gl.constexpr = (N % BLOCK_N != 0) or MASKED_K
    LAST: gl.constexpr = (K - 1) // STEP * STEP

    # [warps, BLOCK_N, BLOCK_K]
    w_warp = _outer(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, w_layout))), 1, 2)
    w_n = _outer(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, w_layout))), 0, 2)
    w_k = _outer(gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, w_layout))), 0, 1)
    w_k = w_warp * BLOCK_K + w_k
    first = gl.program_id(0) * BLOCK_N
    tile = weight + (first + w_n).to(gl.int64) * K + w_k
    there = (first + w_n) < N
    w = _weights(tile, there & (w_k < K), MASKED, EVICT)
    if GATED:
        up_tile = tile + N * K
        up_w = _weights(up_tile, there & (w_k < K), MASKED, EVICT)

    # [warps, BLOCK_K, BLOCK_M]
    x_warp = _outer(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))), 1, 2)
    x_k = _outer(gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(2, x_layout))), 0, 2)
    x_m = _outer(gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, x_layout))), 0, 1)
    x_k = x_warp * BLOCK_K + x_k
    rows = x + x_m.to(gl.int64) * x_stride + x_k
    is_row = (x_m < M) & (x_k >= 0)
    if norm_weight is not None:
        if MASKED_K:
            g = gl.load(norm_weight + x_k, mask=x_k < K, other=0.0)
        else:
            g = gl.load(norm_weight + x_k)

    # [BLOCK_N, BLOCK_M]
    out_layout: gl.constexpr = gl.SliceLayout(0, sums_layout)
    n = first + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, out_layout)), 1)
    m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, out_layout)), 0)
    results = (n < N) & (m < M)
    if bias is not None:
        bias_n = gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
        if GATED:
            up_bias_n = gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)

    if OVERLAP:
        gdc_wait()
    if MASKED_K:
        v = gl.load(rows, mask=is_row & (x_k < K), other=0.0)
    else:
        v = gl.load(rows, mask=is_row, other=0.0)
    if residual is not None:  # loaded here, so that the end does not wait for it
        residual_n = gl.load(
            residual + m.to(gl.int64) * residual_stride + n, mask=results, other=0.0
        )

    sums = gl.zeros([NUM_WARPS, BLOCK_N, BLOCK_M], gl.float32, sums_layout)
    up_sums = sums
    squares = _squares(gl.zeros([NUM_WARPS, BLOCK_K, BLOCK_M], gl.float32, x_layout))
    for start in range(STEP, LAST + STEP, STEP):
        next_w = _weights(tile + start, there & (start + w_k < K), MASKED, EVICT)
        if GATED:
            next_up_w = _weights(up_tile + start, there & (start + w_k < K), MASKED, EVICT)
        if MASKED_K:
            next_v = gl.load(rows + start, mask=is_row & (start + x_k < K), other=0.0)
        else:
            next_v = gl.load(rows + start, mask=is_row, other=0.0)
        if norm_weight is not None:
            if MASKED_K:
                next_g = gl.load(norm_weight + start + x_k, mask=start + x_k < K, other=0.0)
            else:
                next_g = gl.load(norm_weight + start + x_k)
            wide = v.to(gl.float32)
            squares += _squares(wide)
            v = (wide * g.to(gl.float32)).to(v.dtype)
            g = next_g
        sums = mma_v2(w, v, sums)
        if GATED:
            up_sums = mma_v2(up_w, v, up_sums)
            up_w = next_up_w
        w = next_w
        v = next_v
    if norm_weight is not None:
        wide = v.to(gl.float32)
        squares += _squares(wide)
        v = (wide * g.to(gl.float32)).to(v.dtype)
    if OVERLAP:
        # As late as this: its programs are few, and one of the next kernel that has started takes
        # the room of the last of them. Decode steps of Qwen3-4B with 2, 4 and 8 requests took 2.73,
        # 2.80 and 2.93 ms with this at the beginning, and take 2.64, 2.68 and 2.83 ms.
        gdc_launch_dependents()
    sums = mma_v2(w, v, sums)
    y = gl.sum(sums, axis=0)
    up = y
    if GATED:
        up = gl.sum(mma_v2(up_w, v, up_sums), axis=0)
    if norm_weight is not None:
        of_row = gl.sum(gl.sum(squares, axis=1), axis=0)
        of_row = gl.convert_layout(of_row, gl.SliceLayout(0, out_layout))
        scale = gl.expand_dims(gl.rsqrt(of_row / K + eps), 0)
        y *= scale
        up *= scale
    if bias is not None:
        y += bias_n
        if GATED:
            up += up_bias_n
    if GATED:
        y = _activated(y, ACTIVATION) * up
    if residual is not None:
        y += residual_n.to(gl.float32)
    gl.store(out + m.to(gl.int64) * N + n, y.to(out.dtype.element_ty), mask=results)
