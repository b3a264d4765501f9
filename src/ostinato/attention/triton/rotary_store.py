# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel from the raw QKV to rotated queries, with keys and values stored, for any batch.

``paged_attention`` attends afterwards. The norm and RoPE of a row are separate functions, which
``decode_attention`` calls too.

A row is processed in halves, since element i is rotated with element i + HEAD_DIM / 2. The
reference is ``RotaryEmbedding.apply``: the norm rounds to the dtype of ``qkv`` before and after its
weight, and RoPE is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import launch, overlap

# Heads per program.
_HEADS = 16


@triton.jit
def has_request(token, query_start_loc, seq_lens, num_reqs):
    """Whether ``token`` belongs to a request.

    With ``seq_lens``, request r has token r, or none where its length is 0.
    """
    if seq_lens is None:
        owned = token < tl.load(query_start_loc + num_reqs)
    else:
        owned = tl.load(seq_lens + token) > 0
    return owned


@triton.jit
def load_angles(table, position, table_stride, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr):
    """Cosines and sines [1, HALF_PAD] of one position."""
    d = tl.arange(0, HALF_PAD)[None, :]
    row = table + position * table_stride + d
    cos = tl.load(row, mask=d < HEAD_DIM // 2, other=0.0)
    sin = tl.load(row + HEAD_DIM // 2, mask=d < HEAD_DIM // 2, other=0.0)
    return cos, sin


@triton.jit
def load_halves(row, head, there, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr):
    """Heads ``head`` [H, 1] of one token where ``there``, else zeros: two of [H, HALF_PAD]."""
    d = tl.arange(0, HALF_PAD)[None, :]
    there = there & (d < HEAD_DIM // 2)
    start = row + head * HEAD_DIM + d
    first = tl.load(start, mask=there, other=0.0)
    second = tl.load(start + HEAD_DIM // 2, mask=there, other=0.0)
    return first, second


@triton.jit
def apply_rotary(
    first,
    second,
    qk_norm,
    head,
    there,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Normed where ``qk_norm`` is given, and rotated: two of [H, HALF_PAD], in float32."""
    one, two = first.to(tl.float32), second.to(tl.float32)
    if qk_norm is not None:
        squares = tl.sum(one * one + two * two, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        w_one, w_two = load_halves(qk_norm, head, there, HEAD_DIM, HALF_PAD)
        one = (one * scale).to(first.dtype).to(tl.float32) * w_one.to(tl.float32)
        two = (two * scale).to(first.dtype).to(tl.float32) * w_two.to(tl.float32)
        one = one.to(first.dtype).to(tl.float32)
        two = two.to(first.dtype).to(tl.float32)
    return one * cos - two * sin, two * cos + one * sin


@triton.jit
def store_halves(row, first, second, there, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr):
    """Two of [H, HALF_PAD] to the rows at pointers [H, 1], rounded to the dtype there."""
    d = tl.arange(0, HALF_PAD)[None, :]
    there = there & (d < HEAD_DIM // 2)
    tl.store(row + d, first.to(row.dtype.element_ty), mask=there)
    tl.store(row + HEAD_DIM // 2 + d, second.to(row.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_reqs"])
def rotary_store_kernel(
    qkv,
    table,
    qk_norm,
    positions,
    query,
    key_cache,
    value_cache,
    out,
    slot_mapping,
    query_start_loc,
    seq_lens,
    eps,
    num_reqs,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and HEADS of its heads: queries, keys and values.

    Queries go to ``query`` [T, NUM_HEADS, HEAD_DIM], contiguous. A token that belongs to no
    request is not read; its part of ``out`` becomes zero.
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    owned = has_request(token, query_start_loc, seq_lens, num_reqs)
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token, mask=owned, other=0)
    cos, sin = load_angles(table, position, table_stride, HEAD_DIM, HALF_PAD)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    if OVERLAP:
        gdc_wait()
    if owned:
        first, second = load_halves(
            qkv + token * qkv_stride, head, is_query | is_key | is_value, HEAD_DIM, HALF_PAD
        )
        one, two = apply_rotary(
            first, second, qk_norm, head, is_query | is_key, cos, sin, eps, HEAD_DIM, HALF_PAD
        )
        row = query + (token * NUM_HEADS + head) * HEAD_DIM
        store_halves(row, one, two, is_query, HEAD_DIM, HALF_PAD)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        row = key_cache + block * key_block_stride + offset * key_slot_stride
        row += (head - NUM_HEADS) * key_head_stride
        store_halves(row, one, two, is_key & (slot >= 0), HEAD_DIM, HALF_PAD)
        row = value_cache + block * value_block_stride + offset * value_slot_stride
        row += (head - NUM_HEADS - NUM_KV_HEADS) * value_head_stride
        store_halves(row, first, second, is_value & (slot >= 0), HEAD_DIM, HALF_PAD)
    else:
        row = out + token * out_token_stride + head * out_head_stride
        zeros = tl.zeros([HEADS, HALF_PAD], dtype=tl.float32)
        store_halves(row, zeros, zeros, is_query, HEAD_DIM, HALF_PAD)


def rotary_store(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> torch.Tensor:
    """Queries [T, num_heads, head_dim] of ``qkv``; rows that are padding are not written.

    Rows of ``qkv`` and of the RoPE table must be contiguous, and so must the weight of its norm.
    """
    key_cache, value_cache, out, query_start_loc = batch[:4]
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads = key_cache.shape[2]
    table = rotary.table
    query = torch.empty(out.shape, device=out.device, dtype=key_cache.dtype)
    num_pieces = -(-(num_heads + 2 * num_kv_heads) // _HEADS)
    launch(
        rotary_store_kernel,
        (num_tokens, num_pieces),
        (
            qkv,
            table,
            rotary.qk_norm,
            positions,
            query,
            key_cache,
            value_cache,
            out,
            batch.slot_mapping,
            query_start_loc,
            batch.seq_lens if batch.uniform_decode else None,
        ),
        (
            rotary.eps,
            query_start_loc.shape[0] - 1,
            qkv.stride(0),
            table.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
        ),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=_HEADS,
        HALF_PAD=padded_row(head_dim // 2),
        **overlap(out.device),
        num_warps=4,
    )
    return query
