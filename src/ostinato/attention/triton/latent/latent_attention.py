# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Latent attention (MLA) over the paged cache for any batch, after its rows are stored.

All heads share one row per key: a latent vector, which is key and value at once and read once, and
a key with RoPE. Scores are two dots, over the columns of either.

Long contexts are split. The real length decides into how many shares, so short ones are not; the
launch depends on shapes alone. Parts of a share are as long as latent vectors, too much for one
program to combine for all heads, so a kernel of their own combines them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.latent.latent_tiles import LatentTileConfig
from ostinato.attention.triton.paged_attention import find_request
from ostinato.attention.triton.softmax import empty_parts, logits, tile_weights
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import launch, overlap

# Columns that a program of the combine takes, and parts at a time.
_COLUMNS = 128
_PARTS = 16


@triton.jit
def _tile_keys(seq_lens, request, first_query, query_len, max_keys, BLOCK_Q: tl.constexpr):
    """The position of the request's first query, and the number of keys that a tile sees."""
    # Only dummy batches of a capture claim more keys than the table has room for.
    context = tl.minimum(tl.load(seq_lens + request), max_keys) - query_len
    end = context + tl.minimum(first_query + BLOCK_Q, query_len)
    return context, tl.maximum(end, 0)


@triton.jit
def _shares(end, num_splits, BLOCK_N: tl.constexpr):
    """Keys of a share, in whole blocks, and the number of shares."""
    num_blocks = tl.cdiv(end, BLOCK_N)
    share = tl.maximum(tl.cdiv(num_blocks, num_splits), 1)
    return share * BLOCK_N, tl.cdiv(num_blocks, share)


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_splits"])
def latent_kernel(
    query,
    rope_query,
    cache,
    out,
    partial_values,
    partial_highest,
    partial_total,
    query_start_loc,
    seq_lens,
    block_table,
    scale,
    num_reqs,
    max_keys,
    num_splits,
    query_token_stride,
    query_head_stride,
    rope_token_stride,
    rope_head_stride,
    cache_block_stride,
    cache_slot_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of at most BLOCK_Q queries of one request, HEADS heads, and share.

    Request r's tiles start at (query_start_loc[r] + r * (BLOCK_Q - 1)) // BLOCK_Q. Where there is
    more than one share, parts go to ``partial_...`` [T, NUM_HEADS, num_splits], else to ``out``.
    """
    if OVERLAP:
        gdc_launch_dependents()
    HEAD_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    tile = tl.program_id(0) // HEAD_TILES
    first_head = tl.program_id(0) % HEAD_TILES * HEADS
    split = tl.program_id(1)
    request = find_request(query_start_loc, tile, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_query = (tile - (start + request * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    context, end = _tile_keys(seq_lens, request, first_query, query_len, max_keys, BLOCK_Q)
    share, num_shares = _shares(end, num_splits, BLOCK_N)
    begin = split * share
    last = tl.minimum(begin + share, end)
    if OVERLAP:
        gdc_wait()  # in every program: the next kernel waits for this one, not for the stores
    if (first_query >= query_len) | ((split > 0) & (split >= num_shares)):
        return

    m = tl.arange(0, BLOCK_M)
    row = first_query + m // HEADS
    head = first_head + m % HEADS
    owned = (m < BLOCK_Q * HEADS) & (row < query_len) & (head < NUM_HEADS)
    position = context + row
    token = (start + row).to(tl.int64)
    c = tl.arange(0, RANK_PAD)
    r = tl.arange(0, ROPE_PAD)
    query_rows = query + (token * query_token_stride + head * query_head_stride)[:, None]
    q_rope = tl.load(
        rope_query + (token * rope_token_stride + head * rope_head_stride)[:, None] + r[None, :],
        mask=owned[:, None] & (r < ROPE)[None, :],
        other=0.0,
    )
    if CHUNK == RANK_PAD:
        q = tl.load(query_rows + c[None, :], mask=owned[:, None] & (c < RANK)[None, :], other=0.0)

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, RANK_PAD], dtype=tl.float32)
    request_table = block_table + request.to(tl.int64) * table_stride
    for first_key in range(begin, last, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        # Other entries of the table, and other slots, may hold anything.
        seen = key < end
        block = tl.load(request_table + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        rows = cache + (block * cache_block_stride + key % BLOCK_SIZE * cache_slot_stride)[:, None]
        k_rope = tl.load(
            rows + RANK + r[None, :], mask=seen[:, None] & (r < ROPE)[None, :], other=0.0
        )
        k_seen = seen[:, None]
        if RANK_PAD != RANK:
            k_seen = k_seen & (c < RANK)[None, :]
        k = tl.load(rows + c[None, :], mask=k_seen, other=0.0)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        if CHUNK == RANK_PAD:
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        else:  # without tensor cores a dot holds its operands' rows in registers
            for first in tl.static_range(0, RANK_PAD, CHUNK):
                part = first + tl.arange(0, CHUNK)
                q_part = tl.load(
                    query_rows + part[None, :],
                    mask=owned[:, None] & (part < RANK)[None, :],
                    other=0.0,
                )
                k_part = tl.load(
                    rows + part[None, :], mask=seen[:, None] & (part < RANK)[None, :], other=0.0
                )
                scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision="ieee")
        scores = logits(scores, scale, None)
        visible = (key[None, :] <= position[:, None]) & seen[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        weights, highest, total, faded = tile_weights(scores, highest, total)
        values = values * faded[:, None]
        values = tl.dot(weights.to(k.dtype), k, values, input_precision="ieee")

    there = owned[:, None] & (c < RANK)[None, :]
    target = out + (token * out_token_stride + head * out_head_stride)[:, None] + c[None, :]
    result = values / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        if num_shares > 1:
            part = (token * NUM_HEADS + head) * num_splits + split
            tl.store(partial_highest + part, highest, mask=owned)
            tl.store(partial_total + part, total, mask=owned)
            sums = partial_values + (part * RANK)[:, None] + c[None, :]
            tl.store(sums, values, mask=there)
        else:
            tl.store(target, result.to(out.dtype.element_ty), mask=there)
    else:
        tl.store(target, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_splits"])
def combine_latent_kernel(
    partial_values,
    partial_highest,
    partial_total,
    out,
    query_start_loc,
    seq_lens,
    num_reqs,
    max_keys,
    num_splits,
    out_token_stride,
    out_head_stride,
    RANK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token, head, and COLUMNS of its result: the softmax over all its parts.

    Nothing for tokens that ``latent_kernel`` has finished. Other programs wrote the parts, so they
    are read from L2.
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1)
    request = find_request(query_start_loc, token, num_reqs, 1)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_query = (token - start) // BLOCK_Q * BLOCK_Q
    _, end = _tile_keys(seq_lens, request, first_query, query_len, max_keys, BLOCK_Q)
    _, num_shares = _shares(end, num_splits, BLOCK_N)
    if OVERLAP:
        gdc_wait()
    if (token - start >= query_len) | (num_shares <= 1):
        return
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = (token.to(tl.int64) * NUM_HEADS + head) * num_splits
    highest = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    values = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, num_shares, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < num_shares
        peaks = tl.load(
            partial_highest + row + part, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        totals = tl.load(partial_total + row + part, mask=there, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial_values + ((row + part) * RANK)[:, None] + c[None, :],
            mask=there[:, None] & (c < RANK)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        # Queries of a tile see no key of the last shares if these are beyond their position.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(peaks - base)
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(totals * weights, axis=0)
        values = values * faded + tl.sum(sums * weights[:, None], axis=0)
        highest = new_highest
    values = values / tl.where(total > 0.0, total, 1.0)
    target = out + token.to(tl.int64) * out_token_stride + head * out_head_stride + c
    tl.store(target, values.to(out.dtype.element_ty), mask=c < RANK)


def latent_attention(
    query: torch.Tensor, rope_query: torch.Tensor, batch: PagedBatch, config: LatentTileConfig
) -> None:
    """Attend over what is in the cache, and write all rows of ``batch.out`` but padding.

    ``query`` [T, heads, rank], ``rope_query`` [T, heads, rope_dim], both with adjacent elements.
    """
    cache, out, block_table = batch.key_cache, batch.out, batch.block_table
    num_tokens, num_heads, rank = out.shape
    block_size, rope = cache.shape[1], rope_query.shape[2]
    num_splits = config.num_splits
    parts: tuple[Any, ...] | None = None
    if num_splits > 1:
        parts = empty_parts(num_tokens * num_heads * num_splits, rank, out.device)
    lengths = batch.query_start_loc, batch.seq_lens
    counts = lengths[1].shape[0], block_table.shape[1] * block_size, num_splits
    launch(
        latent_kernel,
        (config.num_tiles * -(-num_heads // config.heads), num_splits),
        (query, rope_query, cache, out, *(parts or (None,) * 3), *lengths, block_table),
        (
            batch.scale,
            *counts,
            *query.stride()[:2],
            *rope_query.stride()[:2],
            *cache.stride()[:2],
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=block_size,
        RANK_PAD=padded_row(rank),
        ROPE_PAD=padded_row(rope),
        BLOCK_M=config.block_m,
        BLOCK_Q=config.block_q,
        HEADS=config.heads,
        BLOCK_N=config.block_n,
        CHUNK=config.chunk,
        SPLIT=parts is not None,
        **overlap(out.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts is not None:
        columns = min(_COLUMNS, padded_row(rank))
        launch(
            combine_latent_kernel,
            (num_tokens, num_heads, -(-rank // columns)),
            (*parts, out, *lengths),
            (*counts, *out.stride()[:2]),
            RANK=rank,
            NUM_HEADS=num_heads,
            BLOCK_Q=config.block_q,
            BLOCK_N=config.block_n,
            COLUMNS=columns,
            PARTS=_PARTS,
            **overlap(out.device),
            num_warps=4,
        )
