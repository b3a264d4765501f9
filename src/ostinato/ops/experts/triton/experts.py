# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The two GEMMs of a mixture of experts: gate and up with their activation, and down.

``expert_tile_kernel`` is for any number of tokens: a program computes BLOCK_N results for a block
of up to BLOCK_M tokens of one expert (``ops.experts.triton.routing``). While an expert has no more
tokens than that, its weights are read once. Tokens are gathered where they are, so nothing is
sorted or copied.

The row kernels are for one token, without tensor cores. They work out its experts from the logits
themselves, which saves a kernel.

OVERLAP: nothing can be read early that depends on the experts, except by the second kernel: the
first one starts its dependents after its own wait, and by then the router has ended. So ``down``
reads the routing, and requests weights, before its wait. It reads it from L2 (".cg"): L1 may hold
what an earlier layer had at the same address.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.experts.triton.routing import choose_experts, nth_expert
from ostinato.ops.gemm.triton.linear import prefetch


@triton.jit
def _activated(gate, up, CLAMPED: tl.constexpr):
    """SwiGLU; GPT-OSS clamps both sides, and has another slope and an offset."""
    if CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + tl.exp(-gate)) * up


# --- blocks of tokens -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def expert_tile_kernel(
    x,
    weight,
    bias,
    pair_weights,
    out,
    buckets,
    blocks,
    T,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_N results of one block of tokens.

    GATED: ``x`` has a row per token, ``weight`` [E, 2 N, K], and ``out`` [T * TOP_K, N] a row per
    pair. Otherwise ``x`` has a row per pair, ``weight`` [E, N, K], and ``out`` is [TOP_K, T, N],
    multiplied by ``pair_weights``.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    NUM_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = (N % BLOCK_N != 0) or (K % BLOCK_K != 0)
    if OVERLAP and GATED:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(1)
    first_n = tl.program_id(0) * BLOCK_N
    if index >= tl.load(blocks, cache_modifier=".cg"):
        if OVERLAP and not GATED:
            gdc_wait()  # or this kernel might end before the previous one
        return
    expert = tl.load(blocks + 1 + 3 * index, cache_modifier=".cg").to(tl.int64)
    start = tl.load(blocks + 2 + 3 * index, cache_modifier=".cg")
    num_rows = tl.load(blocks + 3 + 3 * index, cache_modifier=".cg")
    own = weight + expert * ROWS * K
    if OVERLAP and not GATED and PREFETCH > 0:
        prefetch(own, first_n, 0, N, K, BLOCK_N, PREFETCH * BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    there = m < num_rows
    pair = tl.load(buckets + expert * T + start + m, mask=there, other=0, cache_modifier=".cg")
    if OVERLAP and not GATED:
        gdc_wait()
        gdc_launch_dependents()
    row = pair.to(tl.int64)
    if GATED:
        row = row // TOP_K
    inputs = x + row[None, :] * x_stride
    n = first_n + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = own + n.to(tl.int64)[:, None] * K + k[None, :]
        if MASKED:
            inside = (n < N)[:, None] & (k < K)[None, :]
            v = tl.load(inputs + k[:, None], mask=there[None, :] & (k < K)[:, None], other=0.0)
            w = tl.load(tile, mask=inside, other=0.0, eviction_policy=EVICT)
        else:
            v = tl.load(inputs + k[:, None], mask=there[None, :], other=0.0)
            w = tl.load(tile, eviction_policy=EVICT)
        sums = tl.dot(w, v, sums, input_precision="ieee")
        if GATED:
            if MASKED:
                up_w = tl.load(tile + N * K, mask=inside, other=0.0, eviction_policy=EVICT)
            else:
                up_w = tl.load(tile + N * K, eviction_policy=EVICT)
            up_sums = tl.dot(up_w, v, up_sums, input_precision="ieee")
    if bias is not None:
        own_bias = bias + expert * ROWS + n
        sums += tl.load(own_bias, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(own_bias + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = _activated(sums, up_sums, CLAMPED)
        results = pair.to(tl.int64)
    else:
        y = sums * tl.load(pair_weights + pair, mask=there, other=0.0)[None, :]
        results = (pair % TOP_K).to(tl.int64) * T + pair // TOP_K
    place = out + results[None, :] * N + n[:, None]
    tl.store(place, y.to(out.dtype.element_ty), mask=(n < N)[:, None] & there[None, :])


# --- one token ------------------------------------------------------------------------------------


@triton.jit
def _row_weights(
    weight, row, k, N: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr
):
    """[BLOCK_N, BLOCK_K] of ``weight`` at ``row`` and ``k``; rows from N on are another's."""
    tile = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    if MASKED:
        inside = (row < N)[:, None] & (k < K)[None, :]
        return tl.load(tile, mask=inside, other=0.0, eviction_policy=EVICT)
    return tl.load(tile, eviction_policy=EVICT)


@triton.jit
def gate_up_row_kernel(
    x,
    logits,
    slots,
    correction,
    weight,
    bias,
    load,
    out,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    EVICT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per TILES times BLOCK_N results of one chosen expert, program_id(0).

    ``x`` [K] -> ``out`` [TOP_K, N]. Blocks of the weight are loaded one ahead of their use. The
    first program of an expert counts the token in ``load``.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if slots is not None:  # noqa: SIM102  (an "and" would need both as tensors)
        if tl.load(slots, cache_modifier=".cg") < 0:
            return
    turn = tl.program_id(0)
    expert = nth_expert(
        logits, correction, turn, E, E_PAD, SIGMOID, NUM_GROUPS, TOP_GROUPS, GROUP_BEST
    )
    if load is not None:  # noqa: SIM102
        if tl.program_id(1) == 0:
            tl.store(load + expert, tl.load(load + expert) + 1)
    MASKED: tl.constexpr = (N % (BLOCK_N * TILES) != 0) or (K % BLOCK_K != 0)
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    gates = weight + expert.to(tl.int64) * (2 * N * K)
    ups = gates + N * K
    n = tl.program_id(1) * (BLOCK_N * TILES) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w = _row_weights(gates, n, k, N, K, MASKED, EVICT)
    up_w = _row_weights(ups, n, k, N, K, MASKED, EVICT)
    for number in range(TILES):
        sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in range(0, LAST, BLOCK_K):
            ahead = start + BLOCK_K + k
            next_w = _row_weights(gates, n, ahead, N, K, MASKED, EVICT)
            next_up_w = _row_weights(ups, n, ahead, N, K, MASKED, EVICT)
            v = tl.load(x + start + k).to(tl.float32)[None, :]
            sums += w.to(tl.float32) * v
            up_sums += up_w.to(tl.float32) * v
            w, up_w = next_w, next_up_w
        next_n = tl.where(number + 1 < TILES, n + BLOCK_N, N)  # none after the last tile
        next_w = _row_weights(gates, next_n, k, N, K, True, EVICT)
        next_up_w = _row_weights(ups, next_n, k, N, K, True, EVICT)
        v = tl.load(x + LAST + k, mask=LAST + k < K, other=0.0).to(tl.float32)[None, :]
        gate = tl.sum(sums + w.to(tl.float32) * v, axis=1)
        up = tl.sum(up_sums + up_w.to(tl.float32) * v, axis=1)
        if bias is not None:
            own_bias = bias + expert * (2 * N) + n
            gate += tl.load(own_bias, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(own_bias + N, mask=n < N, other=0.0).to(tl.float32)
        y = _activated(gate, up, CLAMPED)
        tl.store(out + turn * N + n, y.to(out.dtype.element_ty), mask=n < N)
        n = next_n
        w, up_w = next_w, next_up_w


@triton.jit
def down_row_kernel(
    x,
    logits,
    slots,
    correction,
    weight,
    bias,
    residual,
    out,
    scale,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVICT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_N results: the weighted sum over the chosen experts, plus residual.

    ``x`` [TOP_K, K] -> ``out`` [N]. The routing and the first weights are read before the wait.
    """
    MASKED: tl.constexpr = (N % BLOCK_N != 0) or (K % BLOCK_K != 0)
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = True
    if slots is not None:
        real = tl.load(slots, cache_modifier=".cg") >= 0
    y = tl.zeros([BLOCK_N], dtype=tl.float32)
    if real:
        experts, weights = choose_experts(
            logits,
            correction,
            scale,
            E,
            E_PAD,
            TOP_K,
            K_PAD,
            SIGMOID,
            RENORMALIZE,
            NUM_GROUPS,
            TOP_GROUPS,
            GROUP_BEST,
        )
        number = tl.arange(0, K_PAD)
        expert = tl.sum(tl.where(number == 0, experts, 0), axis=0).to(tl.int64)
        w = _row_weights(weight + expert * (N * K), n, k, N, K, MASKED, EVICT)
        if OVERLAP:
            for turn in tl.static_range(TOP_K):
                later = tl.sum(tl.where(number == turn, experts, 0), axis=0).to(tl.int64)
                prefetch(weight + later * (N * K), first, 0, N, K, BLOCK_N, K)
            gdc_wait()
            gdc_launch_dependents()
        for turn in range(TOP_K):
            after = tl.sum(tl.where(number == turn + 1, experts, 0), axis=0).to(tl.int64)
            sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
            own = weight + expert * (N * K)
            for start in range(0, LAST, BLOCK_K):
                next_w = _row_weights(own, n, start + BLOCK_K + k, N, K, MASKED, EVICT)
                v = tl.load(x + turn * K + start + k).to(tl.float32)
                sums += w.to(tl.float32) * v[None, :]
                w = next_w
            next_n = tl.where(turn + 1 < TOP_K, n, N)  # none after the last expert
            next_w = _row_weights(weight + after * (N * K), next_n, k, N, K, True, EVICT)
            v = tl.load(x + turn * K + LAST + k, mask=LAST + k < K, other=0.0).to(tl.float32)
            part = tl.sum(sums + w.to(tl.float32) * v[None, :], axis=1)
            if bias is not None:
                part += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
            y += part * tl.sum(tl.where(number == turn, weights, 0.0), axis=0)
            expert = after
            w = next_w
    else:
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()
    if residual is not None:
        y += tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
