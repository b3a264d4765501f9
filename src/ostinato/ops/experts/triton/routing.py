# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The router of a mixture of experts: logits, the choice of experts, and tokens by expert.

``route_kernel`` sorts nothing. Each chosen expert counts its tokens by an atomic add, which gives
every token a place in the expert's *bucket*. The order in a bucket varies, but nothing depends on
it: the rows of an expert's GEMM are independent. The last program to arrive cuts the buckets into
*blocks* of BLOCK_M tokens, the unit of work of the GEMMs (``ops.experts.triton.experts``).

OVERLAP: as in ``ops.gemm.triton.linear``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.triton.dependent_launch import wait_for_previous

_LARGEST = tl.constexpr(3.0e38)  # as in ``ops.experts.routing``


@triton.jit
def _normed(v, g, eps, K: tl.constexpr):
    """The RMS norm of a row with weight ``g``, rounded as in ``ops.norm``; 0 beyond K."""
    v32 = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v32 * v32, axis=0) / K + eps)
    return ((v32 * scale).to(v.dtype).to(tl.float32) * g.to(tl.float32)).to(v.dtype)


@triton.jit
def router_row_kernel(
    x,
    norm_weight,
    weight,
    bias,
    normed,
    logits,
    eps,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_E experts and row: the norm of the row, if any, and its logits.

    The programs of the first experts write ``normed``. For small M: the weight is read from L2 once
    per row.
    """
    if OVERLAP:
        gdc_launch_dependents()
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K_PAD)
    there = (e < E)[:, None] & (k < K)[None, :]
    w = tl.load(weight + e[:, None] * K + k[None, :], mask=there, other=0.0)
    if norm_weight is not None:
        g = tl.load(norm_weight + k, mask=k < K, other=0.0)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + row * x_stride + k, mask=k < K, other=0.0)
    if norm_weight is not None:
        v = _normed(v, g, eps, K)
        if tl.program_id(0) == 0:
            tl.store(normed + row * K + k, v, mask=k < K)
    y = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], axis=1)
    if bias is not None:
        y += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(logits + row * E + e, y, mask=e < E)


@triton.jit(do_not_specialize=["M"])
def router_tile_kernel(
    x,
    weight,
    bias,
    logits,
    M,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_M rows and BLOCK_E experts: logits of rows that are normed already."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = x + m.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for block in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        v = tl.load(rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        there = (e < E)[None, :] & (k < K)[:, None]
        w = tl.load(weight + e[None, :] * K + k[:, None], mask=there, other=0.0)
        sums = tl.dot(v, w, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    place = logits + m.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(place, sums, mask=(m < M)[:, None] & (e < E)[None, :])


@triton.jit
def _scores_of(logits, e, E: tl.constexpr, SIGMOID: tl.constexpr):
    """The logits of experts ``e``, finite, but -inf beyond E; and their scores, 0 beyond E.

    Not from L1, which may hold an earlier layer's if the previous kernel has not ended yet.
    """
    values = tl.load(logits + e, mask=e < E, other=0.0, cache_modifier=".cg")
    values = tl.where(values == values, values, -_LARGEST)
    values = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)
    values = tl.where(e < E, values, float("-inf"))
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(values, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    return values, scores


@triton.jit
def _in_best_groups(
    choice,
    e,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """``choice`` with all experts outside of the best groups at the bottom."""
    GROUPS_PAD: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    g = tl.arange(0, GROUPS_PAD)
    best = tl.where(g < NUM_GROUPS, -_LARGEST, float("-inf"))
    for group in tl.static_range(NUM_GROUPS):
        members = tl.where(e // GROUP_SIZE == group, choice, float("-inf"))
        total = tl.max(members, axis=0)
        if GROUP_BEST > 1 and GROUP_SIZE > 1:
            first = tl.argmax(members, axis=0)
            total += tl.max(tl.where(e == first, float("-inf"), members), axis=0)
        best = tl.where(g == group, tl.maximum(total, -_LARGEST), best)
    kept = e < 0
    for _ in tl.static_range(TOP_GROUPS):
        first = tl.argmax(best, axis=0)
        kept = kept | (e // GROUP_SIZE == first)
        best = tl.where(g == first, float("-inf"), best)
    return tl.where(kept | (choice == float("-inf")), choice, -_LARGEST)


@triton.jit
def _choice_of(
    logits,
    correction,
    e,
    E: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """What experts are chosen by: the larger, the sooner, -inf beyond E; and their scores."""
    values, scores = _scores_of(logits, e, E, SIGMOID)
    choice = values  # a softmax keeps the order, but may round two of them to the same
    if SIGMOID:
        choice = scores
    if correction is not None:
        choice = scores + tl.load(correction + e, mask=e < E, other=0.0).to(tl.float32)
    choice = tl.where(e < E, choice, float("-inf"))
    if NUM_GROUPS > TOP_GROUPS:
        choice = _in_best_groups(choice, e, E // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, GROUP_BEST)
    return choice, scores


@triton.jit
def nth_expert(
    logits,
    correction,
    n,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Expert number ``n`` of ``choose_experts``, alone."""
    e = tl.arange(0, E_PAD)
    choice, _ = _choice_of(logits, correction, e, E, SIGMOID, NUM_GROUPS, TOP_GROUPS, GROUP_BEST)
    for _ in range(n):
        choice = tl.where(e == tl.argmax(choice, axis=0), float("-inf"), choice)
    return tl.argmax(choice, axis=0)


@triton.jit
def choose_experts(
    logits,
    correction,
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
):
    """The experts of a token with these logits, and their weights: [K_PAD] each, TOP_K in use."""
    e = tl.arange(0, E_PAD)
    choice, scores = _choice_of(
        logits, correction, e, E, SIGMOID, NUM_GROUPS, TOP_GROUPS, GROUP_BEST
    )
    number = tl.arange(0, K_PAD)
    experts = tl.zeros([K_PAD], dtype=tl.int32)
    chosen = tl.zeros([K_PAD], dtype=tl.float32)
    for turn in range(TOP_K):
        best = tl.argmax(choice, axis=0)
        score = tl.sum(tl.where(e == best, scores, 0.0), axis=0)
        experts = tl.where(number == turn, best, experts)
        chosen = tl.where(number == turn, score, chosen)
        choice = tl.where(e == best, float("-inf"), choice)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, axis=0) + 1e-20)
    return experts, chosen * scale


@triton.jit
def _zero_parts(parts, token, T, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Zeros to a padding token's rows of ``parts`` [TOP_K, T, WIDTH]."""
    n = tl.arange(0, 1024)
    zeros = tl.zeros([1024], dtype=parts.dtype.element_ty)
    row = parts + token.to(tl.int64) * WIDTH
    for _ in range(TOP_K):
        for start in range(0, WIDTH, 1024):
            tl.store(row + start + n, zeros, mask=start + n < WIDTH)
        row += T * WIDTH


@triton.jit
def _build_blocks(
    counters, load, blocks, FIRST: tl.constexpr, OWN: tl.constexpr, OWN_PAD: tl.constexpr, BLOCK_M
):
    """Cut every expert's tokens into blocks of BLOCK_M; add their counts to ``load``."""
    e = tl.arange(0, OWN_PAD)
    there = e < OWN
    counts = tl.load(counters + e, mask=there, other=0, cache_modifier=".cg")
    if load is not None:
        seen = tl.load(load + FIRST + e, mask=there, other=0)
        tl.store(load + FIRST + e, seen + counts, mask=there)
    num_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    place = blocks + 1 + 3 * (tl.cumsum(num_blocks, axis=0) - num_blocks)
    most = tl.max(num_blocks, axis=0)
    for number in range(most):
        mine = there & (number < num_blocks)
        first = number * BLOCK_M + tl.zeros_like(e)
        tl.store(place + 3 * number, e, mask=mine)
        tl.store(place + 3 * number + 1, first, mask=mine)
        tl.store(place + 3 * number + 2, tl.minimum(counts - first, BLOCK_M), mask=mine)
    tl.store(blocks, tl.sum(num_blocks, axis=0))


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits,
    slots,
    correction,
    counters,
    load,
    weights,
    buckets,
    blocks,
    parts,
    T,
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
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    OWN_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token: its experts into their buckets, their weights, and then the blocks.

    Of the E experts, OWN are here, from FIRST on, which is number 0 below; others are left out.
    ``counters`` [OWN + 1] int32 must be 0; they end as the tokens of each expert, and T.
    ``weights`` [T, TOP_K] float32. ``buckets`` [OWN, T] int32 hold pairs, token * TOP_K + number.
    ``blocks`` int32: their number, then for each an expert, the place of its first token in the
    expert's bucket, and its number of tokens. Tokens with a negative slot choose none, and their
    rows of ``parts`` become zero, unless all are.
    """
    wait_for_previous(OVERLAP)
    token = tl.program_id(0)
    real = True
    if slots is not None:
        real = tl.load(slots + token) >= 0
    if real:
        experts, chosen = choose_experts(
            logits + token.to(tl.int64) * E,
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
        mine = number < TOP_K
        pair = token * TOP_K + number
        tl.store(weights + pair, chosen, mask=mine)
        if OWN < E:
            experts -= FIRST
            mine = mine & (experts >= 0) & (experts < OWN)
        place = tl.atomic_add(counters + experts, 1, mask=mine, sem="relaxed")
        tl.store(buckets + experts.to(tl.int64) * T + place, pair, mask=mine)
    elif OWN == E:
        _zero_parts(parts, token, T, TOP_K, WIDTH)
    tl.debug_barrier()  # all threads have stored before one of them signals it
    arrived = tl.atomic_add(counters + OWN, 1, sem="acq_rel", scope="gpu")
    if arrived == T - 1:
        _build_blocks(counters, load, blocks, FIRST, OWN, OWN_PAD, BLOCK_M)
