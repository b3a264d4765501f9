# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel from the rows of a latent attention's first GEMM to the cache, for any batch.

It norms the latent vector, applies RoPE to the key behind it, stores both, and applies RoPE to the
queries' part. ``latent_attention`` attends afterwards. The reference is ``LatentEmbedding.apply``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.rotary_store import has_request, load_angles, store_halves
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import launch, next_power_of_2, overlap


@triton.jit(do_not_specialize=["num_reqs"])
def latent_store_kernel(
    compressed,
    rope_query,
    table,
    norm,
    positions,
    rotated,
    cache,
    out,
    slot_mapping,
    query_start_loc,
    seq_lens,
    eps,
    num_reqs,
    compressed_stride,
    query_token_stride,
    query_head_stride,
    table_stride,
    cache_block_stride,
    cache_slot_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token.

    Queries go to ``rotated`` [T, NUM_HEADS, ROPE], contiguous. A token that belongs to no request
    is not read; its rows of ``out`` become zero.
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    owned = has_request(token, query_start_loc, seq_lens, num_reqs)
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token, mask=owned, other=0)
    cos, sin = load_angles(table, position, table_stride, ROPE, HALF_PAD)
    c = tl.arange(0, RANK_PAD)
    d = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = ROPE // 2
    weight = tl.load(norm + c, mask=c < RANK, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    if owned:
        row = compressed + token * compressed_stride
        target = cache + slot // BLOCK_SIZE * cache_block_stride
        target += slot % BLOCK_SIZE * cache_slot_stride
        x = tl.load(row + c, mask=c < RANK, other=0.0)
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / RANK + eps)
        normed = (x32 * scale).to(norm.dtype.element_ty).to(tl.float32) * weight
        normed = normed.to(x.dtype).to(cache.dtype.element_ty)
        tl.store(target + c, normed, mask=(c < RANK) & (slot >= 0))

        in_key = (slot >= 0) & (d < HALF)
        one = tl.load(row + RANK + d, mask=d < HALF, other=0.0).to(tl.float32)
        two = tl.load(row + RANK + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        store_halves(
            target + RANK, one * cos - two * sin, two * cos + one * sin, in_key, ROPE, HALF_PAD
        )

        head = tl.arange(0, HEADS_PAD)[:, None]
        there = (head < NUM_HEADS) & (d < HALF)
        source = rope_query + token * query_token_stride + head * query_head_stride + d
        one = tl.load(source, mask=there, other=0.0).to(tl.float32)
        two = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
        heads = rotated + (token * NUM_HEADS + head) * ROPE
        store_halves(
            heads, one * cos - two * sin, two * cos + one * sin, head < NUM_HEADS, ROPE, HALF_PAD
        )
    else:
        zeros = tl.zeros([RANK_PAD], dtype=out.dtype.element_ty)
        for number in range(NUM_HEADS):
            place = out + token * out_token_stride + number * out_head_stride + c
            tl.store(place, zeros, mask=c < RANK)


def latent_store(
    rope_query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
    batch: PagedBatch,
) -> torch.Tensor:
    """Store the rows; return the queries' part with RoPE [T, heads, rope_dim].

    Elements of all rows must be adjacent. Queries of padding are not written.
    """
    cache, out, query_start_loc = batch.key_cache, batch.out, batch.query_start_loc
    num_tokens, num_heads, rank = out.shape
    rope = rope_query.shape[2]
    rotated = torch.empty((num_tokens, num_heads, rope), device=out.device, dtype=rope_query.dtype)
    table, norm = embedding.table, embedding.norm
    launch(
        latent_store_kernel,
        (num_tokens,),
        (
            compressed,
            rope_query,
            table,
            norm.weight,
            positions,
            rotated,
            cache,
            out,
            batch.slot_mapping,
            query_start_loc,
            batch.seq_lens if batch.uniform_decode else None,
        ),
        (
            norm.eps,
            query_start_loc.shape[0] - 1,
            compressed.stride(0),
            *rope_query.stride()[:2],
            table.stride(0),
            *cache.stride()[:2],
            *out.stride()[:2],
        ),
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        HEADS_PAD=next_power_of_2(num_heads),
        RANK_PAD=padded_row(rank),
        HALF_PAD=padded_row(rope // 2),
        **overlap(out.device),
        num_warps=4,
    )
    return rotated
