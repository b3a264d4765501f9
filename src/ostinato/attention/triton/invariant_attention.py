# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Attention over the paged cache whose every result has the same bits in any batch.

Keys are taken TILE at a time, from absolute positions that TILE divides, and SEGMENT of them have a
softmax of their own. The softmaxes of a query's segments are folded from first to last. Lengths and
shapes of the batch decide how many programs share this work, and neither the order of a sum nor
where a softmax begins: a query has the same result in a decode step, in a chunk of any length, and
behind a prefix that was computed earlier. A tile of which a query sees nothing leaves its sums as
they are.

Sums of weights come from the tensor cores too, as a column of the values would: the order of a
reduction over a tile's columns would follow from how its rows are spread over threads. Nothing is
contracted into fused multiply-adds that the source does not state (``enable_fp_fusion=False``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.invariant_tiles import SEGMENT_KEYS, InvariantTiles
from ostinato.attention.triton.paged_attention import find_request
from ostinato.attention.triton.softmax import LOG2_E, Parts, empty_parts, logits
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import launch, overlap

TILE = tl.constexpr(64)
SEGMENT = tl.constexpr(SEGMENT_KEYS)
# Columns of ones beside the values: the fewest that tensor cores take in every layout.
_ONES = tl.constexpr(16)
# Segments whose parts are loaded at once.
_AT_ONCE = tl.constexpr(8)


@triton.jit
def _fold(highest, total, values, part_highest, part_total, part_values):
    """The softmax over what was folded before, and one more part. A part of no key is a no-op."""
    new_highest = tl.maximum(highest, part_highest)
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    old, new = tl.exp2(highest - base), tl.exp2(part_highest - base)
    values = values * old[:, None] + part_values * new[:, None]
    return new_highest, total * old + part_total * new, values


@triton.jit
def _empty(sinks, head, owned, ROWS: tl.constexpr, VALUE_PAD: tl.constexpr):
    """The softmax over no key, or over the sink of each head, which has no value."""
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + head, mask=owned, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    return highest, total, tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)


@triton.jit
def _result(total, values):
    return values / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_segments"])
def invariant_attend_kernel(
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
    num_segments,
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
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of at most BLOCK_Q queries of one request, and KV head.

    Rows of its matrices are queries x the heads that share the KV head, and request r's tiles start
    at (query_start_loc[r] + r * (BLOCK_Q - 1)) // BLOCK_Q, as in ``attend_kernel``. SPLIT: several
    programs share its segments, and write their softmaxes to ``partial_...`` [T, heads,
    num_segments]; else the one folds them.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
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
    ones = tl.full([TILE, _ONES], 1.0, dtype=value_cache.dtype.element_ty)

    # The keys that any query of the tile sees.
    last = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    if window is not None:
        first = tl.maximum(tl.maximum(context + first_query, 0) - window + 1, 0)

    highest, total, values = _empty(sinks, head, owned, BLOCK_M, VALUE_PAD)
    request_table = block_table + request.to(tl.int64) * table_stride
    for segment in range(
        first // SEGMENT + tl.program_id(1), (last + SEGMENT) // SEGMENT, tl.num_programs(1)
    ):
        part_highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        part_total = tl.zeros([BLOCK_M, _ONES], dtype=tl.float32)
        part_values = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
        begin = tl.maximum(segment * SEGMENT, first // TILE * TILE)
        end = tl.minimum((segment + 1) * SEGMENT, last + 1)
        for first_key in tl.range(begin, end, TILE, num_stages=STAGES):
            key = first_key + tl.arange(0, TILE)
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
            k_rows = block * key_block_stride + offset * key_slot_stride
            k_rows += kv_head * key_head_stride
            k = tl.load(key_cache + k_rows[:, None] + d[None, :], mask=k_seen, other=0.0)
            v_rows = block * value_block_stride + offset * value_slot_stride
            v_rows += kv_head * value_head_stride
            v = tl.load(value_cache + v_rows[:, None] + e[None, :], mask=v_seen, other=0.0)

            scores = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, soft_cap)
            distance = position[:, None] - key[None, :]
            visible = distance >= 0
            if window is not None:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))

            new_highest = tl.maximum(part_highest, tl.max(scores, axis=1))
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - base[:, None]).to(v.dtype)
            faded = tl.exp2(part_highest - base)[:, None]
            part_total = tl.dot(weights, ones, part_total * faded, input_precision="ieee")
            part_values = tl.dot(weights, v, part_values * faded, input_precision="ieee")
            part_highest = new_highest

        part_sum = tl.max(part_total, axis=1)  # its columns are equal
        if SPLIT:
            part = (token * (NUM_KV_HEADS * GROUP) + head) * num_segments + segment
            tl.store(partial_highest + part, part_highest, mask=owned)
            tl.store(partial_total + part, part_sum, mask=owned)
            there = owned[:, None] & (e < VALUE_DIM)[None, :]
            place = partial_values + (part * VALUE_DIM)[:, None] + e[None, :]
            tl.store(place, part_values, mask=there)
        else:
            highest, total, values = _fold(
                highest, total, values, part_highest, part_sum, part_values
            )

    if not SPLIT:
        there = owned[:, None] & (e < VALUE_DIM)[None, :]
        target = out + (token * out_token_stride + head * out_head_stride)[:, None] + e[None, :]
        tl.store(target, _result(total, values).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_segments"])
def fold_kernel(
    partial_values,
    partial_highest,
    partial_total,
    out,
    query_start_loc,
    seq_lens,
    sinks,
    window,
    num_reqs,
    max_keys,
    num_segments,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and head: folds the segments that it sees, from first to last."""
    if OVERLAP:
        gdc_launch_dependents()
    number = tl.program_id(0)
    token = number.to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    request = find_request(query_start_loc, number, num_reqs, 1)
    end = tl.load(query_start_loc + request + 1)
    position = tl.minimum(tl.load(seq_lens + request), max_keys) - end + number
    if OVERLAP:
        gdc_wait()
    if number >= end:
        return  # padding, for which nothing was written
    highest, total, values = _empty(sinks, head, head >= 0, 1, VALUE_PAD)
    first = 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0) // SEGMENT
    e = tl.arange(0, VALUE_PAD)[None, :]
    row = (token * NUM_HEADS + head) * num_segments
    for start in range(first, (position + SEGMENT) // SEGMENT, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            part = row + start + ahead
            there = (part >= 0) & ((start + ahead) * SEGMENT <= position)
            highest, total, values = _fold(
                highest,
                total,
                values,
                tl.load(partial_highest + part, mask=there, other=float("-inf")),
                tl.load(partial_total + part, mask=there, other=0.0),
                tl.load(
                    partial_values + part[:, None] * VALUE_DIM + e,
                    mask=there[:, None] & (e < VALUE_DIM),
                    other=0.0,
                ),
            )
    target = out + token * out_token_stride + head[:, None] * out_head_stride + e
    tl.store(target, _result(total, values).to(out.dtype.element_ty), mask=e < VALUE_DIM)


def invariant_attention(query: torch.Tensor, batch: PagedBatch, tiles: InvariantTiles) -> None:
    """Attend over what is in the cache, and write all rows of ``batch.out`` but padding."""
    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    num_tokens, num_heads, value_dim = out.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_reqs, max_keys = query_start_loc.shape[0] - 1, block_table.shape[1] * block_size
    num_segments = -(-max_keys // SEGMENT_KEYS)
    parts: Parts | None = None
    if tiles.num_splits > 1:
        parts = empty_parts(num_tokens * num_heads * num_segments, value_dim, out.device)
    launch(
        invariant_attend_kernel,
        (tiles.num_tiles * num_kv_heads, tiles.num_splits),
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
            num_reqs,
            max_keys,
            num_segments,
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
        BLOCK_M=tiles.block_m,
        BLOCK_Q=tiles.block_q,
        STAGES=tiles.num_stages,
        SPLIT=parts is not None,
        **overlap(out.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if parts is None:
        return
    launch(
        fold_kernel,
        (num_tokens, num_heads),
        (*parts, out, query_start_loc, seq_lens, batch.sinks),
        (batch.window, num_reqs, max_keys, num_segments, *out.stride()[:2]),
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=padded_row(value_dim),
        **overlap(out.device),
        num_warps=1,
        enable_fp_fusion=False,
    )
