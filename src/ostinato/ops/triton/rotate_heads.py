# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One kernel: RoPE of queries and keys, by cosines and sines of every token."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.dependent_launch import wait_for_previous


@triton.jit
def _two_halves(row, there, HALF: tl.constexpr):
    first = tl.load(row, mask=there, other=0.0).to(tl.float32)
    second = tl.load(row + HALF, mask=there, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def rotate_heads_kernel(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and HEADS of its heads: queries, then keys. Results are contiguous."""
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    kv_head = head - NUM_HEADS
    d = tl.arange(0, HALF_PAD)[None, :]
    is_query = (head < NUM_HEADS) & (d < HALF)
    is_key = (kv_head >= 0) & (kv_head < NUM_KV_HEADS) & (d < HALF)
    cos_one, cos_two = _two_halves(cos + token * cos_stride + d, d < HALF, HALF)
    sin_one, sin_two = _two_halves(sin + token * sin_stride + d, d < HALF, HALF)
    row = query + token * query_token_stride + head * query_head_stride + d
    one, two = _two_halves(row, is_query, HALF)
    row = key + token * key_token_stride + kv_head * key_head_stride + d
    key_one, key_two = _two_halves(row, is_key, HALF)
    one, two = one + key_one, two + key_two  # one of them is zero
    first = (one * cos_one - two * sin_one).to(query_out.dtype.element_ty)
    second = (two * cos_two + one * sin_two).to(query_out.dtype.element_ty)
    row = query_out + (token * NUM_HEADS + head) * (2 * HALF) + d
    tl.store(row, first, mask=is_query)
    tl.store(row + HALF, second, mask=is_query)
    row = key_out + (token * NUM_KV_HEADS + kv_head) * (2 * HALF) + d
    tl.store(row, first, mask=is_key)
    tl.store(row + HALF, second, mask=is_key)
