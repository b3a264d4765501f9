# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Everything between the QKV GEMM and the output GEMM of a decode batch, in one kernel.

Request r of the batch has one token, number r, or none (length 0). A program takes one request, one
KV head and one share of the keys, and computes the queries it needs itself. The new key and value
go from registers into both the cache and the softmax, so their slot is never read. Where keys are
split, programs write their parts of the softmax to memory and increment a counter; the last to
finish combines the parts. The real length decides how many shares there are, so short requests have
nothing to combine; the launch depends on shapes alone.

With a ``StreamRule`` the batch's lengths decide who attends. If they ask for even shares, this
kernel only writes the queries, the new keys and the new values, and ``stream_decode``, launched
next, attends; otherwise that one does nothing.

OVERLAP: before the wait the kernel also reads older keys and values, which were written before the
forward began. It writes parts, counters, the cache and ``out`` after the wait, when earlier users
of that memory are done.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.kv_rows import prefetch, row_pointers
from ostinato.attention.triton.rotary_store import (
    apply_rotary,
    load_angles,
    load_halves,
    store_halves,
)
from ostinato.attention.triton.softmax import LOG2_E, combine_parts, empty_parts, logits
from ostinato.attention.triton.tile_config import DecodeTileConfig, StreamRule, padded_row
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, next_power_of_2, overlap


@triton.jit
def shares_evenly(seq_lens, num_reqs, max_keys, min_longest, min_spread, REQS: tl.constexpr):
    """Whether ``StreamRule`` asks for even shares; ``stream_decode`` computes the same."""
    r = tl.arange(0, REQS)
    lengths = tl.load(seq_lens + r, mask=r < num_reqs, other=0)
    lengths = tl.maximum(tl.minimum(lengths, max_keys), 0).to(tl.int64)
    longest = tl.max(lengths, axis=0)
    all_keys = tl.sum(lengths, axis=0)
    with_keys = tl.sum((lengths > 0).to(tl.int64), axis=0)
    return (longest >= min_longest) & (2 * longest * with_keys >= min_spread * all_keys)


@triton.jit(do_not_specialize=["max_keys", "num_splits", "num_reqs", "min_longest", "min_spread"])
def decode_kernel(
    qkv,
    table,
    qk_norm,
    positions,
    key_cache,
    value_cache,
    out,
    partial_values,
    partial_highest,
    partial_total,
    counters,
    seq_lens,
    block_table,
    slot_mapping,
    sinks,
    query,
    eps,
    scale,
    window,
    soft_cap,
    max_keys,
    num_splits,
    num_reqs,
    min_longest,
    min_spread,
    qkv_stride,
    table_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    REQS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per request and KV head (axis 0) and share of the keys (axis 1).

    The rows of its matrices are the GROUP query heads that share the KV head. With ``query``
    [T, NUM_HEADS, HEAD_DIM], contiguous, the rule decides whether this kernel attends.
    """
    if OVERLAP:
        gdc_launch_dependents()
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.program_id(0)
    split = tl.program_id(1)
    request = pair // NUM_KV_HEADS
    kv_head = pair % NUM_KV_HEADS
    # Only dummy batches of a capture claim more keys than the table has room for.
    seq_len = tl.minimum(tl.load(seq_lens + request), max_keys)
    slot = tl.load(slot_mapping + request)
    if query is not None:
        streams = shares_evenly(seq_lens, num_reqs, max_keys, min_longest, min_spread, REQS)
    position = tl.load(positions + request, mask=seq_len > 0, other=0)
    cos, sin = load_angles(table, position, table_stride, HEAD_DIM, HALF_PAD)

    # Whole blocks of keys for each share; the last share has the new key, at seq_len - 1.
    first = 0
    if window is not None:
        first = tl.maximum(seq_len - window, 0)
    begin = first // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(seq_len - begin, BLOCK_N)
    share = tl.maximum(tl.cdiv(num_blocks, num_splits), 1)
    num_shares = tl.cdiv(num_blocks, share)
    if query is not None:
        num_shares = tl.where(streams, tl.minimum(num_shares, 1), num_shares)
    has_new = split == num_shares - 1
    begin += split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, seq_len - 1)

    request_table = block_table + request.to(tl.int64) * block_table_stride
    if OVERLAP:
        if PREFETCH > 0:
            ahead = begin + tl.arange(0, PREFETCH)
            due = (ahead >= first) & (ahead < end)
            if query is not None:
                due = due & ~streams
            k_ahead = row_pointers(
                key_cache,
                request_table,
                ahead,
                due,
                kv_head,
                key_block_stride,
                key_slot_stride,
                key_head_stride,
                BLOCK_SIZE,
            )
            v_ahead = row_pointers(
                value_cache,
                request_table,
                ahead,
                due,
                kv_head,
                value_block_stride,
                value_slot_stride,
                value_head_stride,
                BLOCK_SIZE,
            )
            prefetch(k_ahead, HEAD_DIM, LINE, LINES)
            prefetch(v_ahead, HEAD_DIM, LINE, LINES)
        gdc_wait()  # in every program: the next kernel waits for this one alone

    token = request.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HALF_PAD)
    e = tl.arange(0, VALUE_PAD)
    owned = m < GROUP
    head = kv_head * GROUP + m
    there = owned[:, None] & (e < HEAD_DIM)[None, :]
    target = out + token * out_token_stride + (head * out_head_stride)[:, None] + e[None, :]
    if num_shares == 0:
        zeros = tl.zeros([BLOCK_M, VALUE_PAD], dtype=out.dtype.element_ty)
        tl.store(target, zeros, mask=there & (split == 0))
    if split >= num_shares:
        return

    # The queries, rounded as they would be in memory; the new key and value likewise.
    row = qkv + token * qkv_stride
    one, two = load_halves(row, head[:, None], owned[:, None], HEAD_DIM, HALF_PAD)
    one, two = apply_rotary(
        one, two, qk_norm, head[:, None], owned[:, None], cos, sin, eps, HEAD_DIM, HALF_PAD
    )
    q_one, q_two = one.to(key_cache.dtype.element_ty), two.to(key_cache.dtype.element_ty)
    key_head = tl.full([1, 1], NUM_HEADS, dtype=tl.int32) + kv_head
    one, two = load_halves(row, key_head, key_head >= 0, HEAD_DIM, HALF_PAD)
    one, two = apply_rotary(
        one, two, qk_norm, key_head, key_head >= 0, cos, sin, eps, HEAD_DIM, HALF_PAD
    )
    new_one, new_two = one.to(key_cache.dtype.element_ty), two.to(key_cache.dtype.element_ty)
    new_value = tl.load(
        row + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + e[None, :],
        mask=(e < HEAD_DIM)[None, :],
        other=0.0,
    )
    new_value = new_value.to(value_cache.dtype.element_ty)
    stored = has_new & (slot >= 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_row = key_cache + block * key_block_stride + offset * key_slot_stride
    k_row = k_row + (key_head - NUM_HEADS) * key_head_stride
    store_halves(k_row, new_one, new_two, stored & (key_head >= 0), HEAD_DIM, HALF_PAD)
    v_row = value_cache + block * value_block_stride + offset * value_slot_stride
    v_row = v_row + kv_head * value_head_stride + e[None, :]
    tl.store(v_row, new_value, mask=stored & (e < HEAD_DIM)[None, :])
    if query is not None:  # noqa: SIM102  one is known when the kernel is compiled
        if streams:
            q_row = query + (token * NUM_HEADS + head[:, None]) * HEAD_DIM
            store_halves(q_row, q_one, q_two, owned[:, None], HEAD_DIM, HALF_PAD)
            return

    # The softmax begins with the new key, in the share that has it.
    score = q_one.to(tl.float32) * new_one.to(tl.float32)
    score += q_two.to(tl.float32) * new_two.to(tl.float32)
    starts = (m >= 0) & has_new
    highest = tl.where(starts, logits(tl.sum(score, axis=1), scale, soft_cap), float("-inf"))
    total = tl.where(starts, 1.0, 0.0)
    values = tl.where(
        starts[:, None], tl.broadcast_to(new_value.to(tl.float32), [BLOCK_M, VALUE_PAD]), 0.0
    )
    if sinks is not None:  # like a key without a value, in the first share
        sink = tl.load(sinks + head, mask=owned, other=0.0).to(tl.float32) * LOG2_E
        sink = tl.where((m >= 0) & (split == 0), sink, float("-inf"))
        new_highest = tl.maximum(highest, sink)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        faded = tl.exp2(highest - base)
        total = total * faded + tl.exp2(sink - base)
        values = values * faded[:, None]
        highest = new_highest

    for first_key in range(begin, end, BLOCK_N):
        key_position = first_key + tl.arange(0, BLOCK_N)
        # Other entries of the table, and other slots, may hold anything.
        seen = (key_position >= first) & (key_position < end)
        k_seen = seen[:, None]
        v_seen = seen[:, None]
        if HALF_PAD != HALF:
            k_seen = k_seen & (d < HALF)[None, :]
        if VALUE_PAD != HEAD_DIM:
            v_seen = v_seen & (e < HEAD_DIM)[None, :]
        k_rows = row_pointers(
            key_cache,
            request_table,
            key_position,
            seen,
            kv_head,
            key_block_stride,
            key_slot_stride,
            key_head_stride,
            BLOCK_SIZE,
        )
        k_one = tl.load(k_rows + d[None, :], mask=k_seen, other=0.0)
        k_two = tl.load(k_rows + HALF + d[None, :], mask=k_seen, other=0.0)
        v_rows = row_pointers(
            value_cache,
            request_table,
            key_position,
            seen,
            kv_head,
            value_block_stride,
            value_slot_stride,
            value_head_stride,
            BLOCK_SIZE,
        )
        v = tl.load(v_rows + e[None, :], mask=v_seen, other=0.0)

        scores = tl.dot(q_one, tl.trans(k_one), input_precision="ieee")
        scores = tl.dot(q_two, tl.trans(k_two), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], logits(scores, scale, soft_cap), float("-inf"))
        # Finite: only the share with the new key can have a block without a visible key.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        faded = tl.exp2(highest - new_highest)
        total = total * faded + tl.sum(weights, axis=1)
        values = values * faded[:, None]
        values = tl.dot(weights.to(v.dtype), v, values, input_precision="ieee")
        highest = new_highest

    if not SPLIT:
        tl.store(target, (values / total[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        if num_shares == 1:
            tl.store(target, (values / total[:, None]).to(out.dtype.element_ty), mask=there)
        else:
            part = pair.to(tl.int64) * num_splits
            part_row = (part + split) * GROUP + m
            tl.store(partial_highest + part_row, highest, mask=owned)
            tl.store(partial_total + part_row, total, mask=owned)
            sums = partial_values + (part_row * HEAD_DIM)[:, None] + e[None, :]
            tl.store(sums, values, mask=there)
            tl.debug_barrier()  # all threads have written before one counts the program
            arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == num_shares - 1:
                combined = combine_parts(
                    partial_values,
                    partial_highest,
                    partial_total,
                    part,
                    num_shares,
                    GROUP,
                    ROWS,
                    HEAD_DIM,
                    VALUE_PAD,
                    CHUNK,
                )
                r = tl.arange(0, ROWS)
                r_there = (r < GROUP)[:, None] & (e < HEAD_DIM)[None, :]
                r_target = out + token * out_token_stride + e[None, :]
                r_target += ((kv_head * GROUP + r) * out_head_stride)[:, None]
                tl.store(r_target, combined.to(out.dtype.element_ty), mask=r_there)


def decode_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: RotaryEmbedding,
    batch: PagedBatch,
    config: DecodeTileConfig,
    rule: StreamRule | None = None,
) -> torch.Tensor | None:
    """Attend and write all of ``batch.out``. ``qkv`` and ``rotary`` are as in ``rotary_store``.

    With a ``rule``: the queries for ``stream_decode``, which must follow with the same rule.
    """
    # Once per layer: unpacking is faster than a dozen attribute lookups.
    key_cache, value_cache, out, _, seq_lens, block_table, slot_mapping = batch[:7]
    sinks, scale, window, soft_cap = batch[7:11]
    num_tokens, num_heads, head_dim = out.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_splits = config.num_splits
    split = num_splits > 1
    parts: tuple[Any, ...] = (None, None, None, None)
    if split:
        parts = (
            *empty_parts(num_tokens * num_heads * num_splits, head_dim, out.device),
            take_counters(out.device, num_tokens * num_kv_heads),
        )
    query = None
    if rule is not None:
        query = torch.empty(out.shape, device=out.device, dtype=key_cache.dtype)
    table = rotary.table
    value_pad = padded_row(head_dim)
    rows_pad = next_power_of_2(group)
    # As many parts at a time as fit into about 64 registers per thread.
    chunk = max(1, min(16, 2048 * config.num_warps // (rows_pad * value_pad)))
    line = 128 // key_cache.itemsize  # of the L2 cache: 128 bytes
    launch(
        decode_kernel,
        (num_tokens * num_kv_heads, num_splits),
        (
            qkv,
            table,
            rotary.qk_norm,
            positions,
            key_cache,
            value_cache,
            out,
            *parts,
            seq_lens,
            block_table,
            slot_mapping,
            sinks,
            query,
        ),
        (
            rotary.eps,
            scale,
            window,
            soft_cap,
            block_table.shape[1] * block_size,
            num_splits,
            seq_lens.shape[0],
            *(rule or (0, 0)),
            qkv.stride(0),
            table.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF_PAD=padded_row(head_dim // 2),
        VALUE_PAD=value_pad,
        BLOCK_M=max(16, rows_pad),
        BLOCK_N=config.block_n,
        SPLIT=split,
        ROWS=rows_pad,
        CHUNK=chunk,
        PREFETCH=config.prefetch,
        LINE=line,
        LINES=next_power_of_2(-(-head_dim // line)),
        REQS=next_power_of_2(seq_lens.shape[0]),
        **overlap(out.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return query
