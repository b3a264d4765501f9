# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Attention over the paged cache for any batch, after its keys and values are stored.

``store_kv`` is launched without overlap, so all that came before it is done when the kernel here
starts. ``rotary_store``, which may run instead, is launched with overlap, so queries are read after
the wait.

The cache may hold a part of the keys (``parallel.context.context_part``). Results of parts are
weighted by the log-sum-exp of their scores, which is written behind the values of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.softmax import (
    LOG2_E,
    combine,
    empty_parts,
    log_sum_exp,
    logits,
    tile_weights,
)
from ostinato.attention.triton.tile_config import TileConfig, padded_row
from ostinato.ops.triton.launch import launch, overlap

# How many requests a program examines at a time to find its own.
SEARCH = tl.constexpr(256)


@triton.jit
def find_request(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose tiles start at or before ``tile``.

    Counting reads all starts at once; a bisection would wait for memory at every step.
    """
    count = 0
    for first in range(0, num_reqs, SEARCH):
        request = first + tl.arange(0, SEARCH)
        there = request < num_reqs
        start = tl.load(query_start_loc + request, mask=there, other=0)
        first_tile = (start + request * (BLOCK_Q - 1)) // BLOCK_Q
        count += tl.sum((there & (first_tile <= tile)).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _num_own(count, SIZE: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of the first ``count`` keys are in this part."""
    count = tl.maximum(count, 0)
    rest = count % (SIZE * INTERLEAVE) - RANK * INTERLEAVE
    return count // (SIZE * INTERLEAVE) * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)


@triton.jit
def _position_of(key, SIZE: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The position of this part's key number ``key``."""
    if SIZE > 1:
        key = (key // INTERLEAVE * SIZE + RANK) * INTERLEAVE + key % INTERLEAVE
    return key


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_splits"])
def attend_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial_values,
    partial_highest,
    partial_total,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    scale,
    window,
    soft_cap,
    num_reqs,
    max_keys,
    num_splits,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of at most BLOCK_Q queries of one request, KV head, and split of keys.

    The rows of its matrices are queries x the heads that share the KV head. Request r's tiles start
    at (query_start_loc[r] + r * (BLOCK_Q - 1)) // BLOCK_Q, which leaves each the tiles it needs.
    With SPLIT the part of the softmax goes to ``partial_...`` [T, heads, splits], else to ``out``,
    and with LSE the log-sum-exp of the scores to the column behind the values.

    SIZE > 1: the cache has the keys of part RANK of SIZE, and lengths are of the whole.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    request = find_request(query_start_loc, tile, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_query = (tile - (start + request * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    # Only dummy batches of a capture claim more keys than the table has room for.
    context = tl.minimum(tl.load(seq_lens + request), max_keys) - query_len
    m = tl.arange(0, BLOCK_M)
    row = first_query + m // GROUP
    owned = (m < BLOCK_Q * GROUP) & (row < query_len)
    position = context + row
    head = kv_head * GROUP + m % GROUP
    token = (start + row).to(tl.int64)
    d = tl.arange(0, HEAD_PAD)
    e = tl.arange(0, VALUE_PAD)
    if OVERLAP:
        gdc_wait()  # in every program: the next kernel waits for this one, not for the stores
    if first_query >= query_len:
        return
    q = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=owned[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
    if sinks is not None:  # like a first key without a value, in the first split
        sink = tl.load(sinks + head, mask=owned, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where((split == 0) & (position >= 0), sink, highest)
        total = tl.where((split == 0) & (position >= 0), 1.0, total)

    # The keys that any query of the tile sees, and this split's share of them.
    last = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    if window is not None:
        first = tl.maximum(tl.maximum(context + first_query, 0) - window + 1, 0)
    if SIZE > 1:  # from here on keys are counted as this part has them
        first = _num_own(first, SIZE, RANK, INTERLEAVE)
        last = _num_own(last + 1, SIZE, RANK, INTERLEAVE) - 1
    begin = first // BLOCK_N * BLOCK_N
    end = last + 1
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), num_splits) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)

    request_table = block_table + request.to(tl.int64) * table_stride
    for first_key in range(begin, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        # Other entries of the table, and other slots, may hold anything.
        seen = (key >= first) & (key <= last)
        block = tl.load(request_table + key // BLOCK_SIZE, mask=seen, other=0)
        block = block.to(tl.int64)
        offset = key % BLOCK_SIZE
        k_seen = seen[:, None]
        v_seen = seen[:, None]
        if HEAD_PAD != HEAD_DIM:
            k_seen = k_seen & (d < HEAD_DIM)[None, :]
        if VALUE_PAD != VALUE_DIM:
            v_seen = v_seen & (e < VALUE_DIM)[None, :]
        k_rows = block * key_block_stride + offset * key_slot_stride + kv_head * key_head_stride
        k = tl.load(key_cache + k_rows[:, None] + d[None, :], mask=k_seen, other=0.0)
        v_rows = (
            block * value_block_stride + offset * value_slot_stride + kv_head * value_head_stride
        )
        v = tl.load(value_cache + v_rows[:, None] + e[None, :], mask=v_seen, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = logits(scores, scale, soft_cap)
        distance = position[:, None] - _position_of(key, SIZE, RANK, INTERLEAVE)[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))

        weights, highest, total, faded = tile_weights(scores, highest, total)
        values = values * faded[:, None]
        values = tl.dot(weights.to(v.dtype), v, values, input_precision="ieee")

    there = owned[:, None] & (e < VALUE_DIM)[None, :]
    if SPLIT:
        part = (token * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(partial_highest + part, highest, mask=owned)
        tl.store(partial_total + part, total, mask=owned)
        there = there & (highest > float("-inf"))[:, None]
        tl.store(partial_values + (part * VALUE_DIM)[:, None] + e[None, :], values, mask=there)
    else:
        values = values / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + (token * out_token_stride + head * out_head_stride)[:, None] + e[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=there)
        if LSE:
            row_end = out + token * out_token_stride + head * out_head_stride + VALUE_DIM
            tl.store(row_end, log_sum_exp(highest, total), mask=owned)


def paged_attention(
    query: torch.Tensor,
    batch: PagedBatch,
    config: TileConfig,
    part: tuple[int, int, int] | None = None,
) -> None:
    """Attend over what is in the cache, and write all rows of ``batch.out`` but padding.

    ``part`` (size, rank, interleave): the cache has these keys of all that ``batch.seq_lens``
    counts, and the log-sum-exp goes behind the values: rows of ``out``, in float32, must have room.
    """
    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    num_tokens, num_heads, value_dim = out.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_splits = config.num_splits
    size, rank, interleave = part or (1, 0, 1)
    parts = None
    if num_splits > 1:
        parts = empty_parts(num_tokens * num_heads * num_splits, value_dim, out.device)
    launch(
        attend_kernel,
        (config.num_tiles * num_kv_heads, num_splits),
        (
            query,
            key_cache,
            value_cache,
            out,
            *(parts or (None, None, None)),
            query_start_loc,
            seq_lens,
            block_table,
            batch.sinks,
        ),
        (
            batch.scale,
            batch.window,
            batch.soft_cap,
            query_start_loc.shape[0] - 1,
            block_table.shape[1] * block_size * size,
            num_splits,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=query.shape[2],
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        HEAD_PAD=padded_row(query.shape[2]),
        VALUE_PAD=padded_row(value_dim),
        BLOCK_M=config.block_m,
        BLOCK_Q=config.block_q,
        BLOCK_N=config.block_n,
        SPLIT=parts is not None,
        LSE=part is not None,
        SIZE=size,
        RANK=rank,
        INTERLEAVE=interleave,
        **overlap(out.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts is not None:
        combine(parts, batch, num_splits, lse=part is not None)
