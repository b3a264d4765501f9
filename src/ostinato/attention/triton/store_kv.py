# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Stores keys and values in the paged cache. Launched without overlap: see ``paged_attention``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import can_overlap, launch, next_power_of_2


@triton.jit(do_not_specialize=["num_reqs"])
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    out,
    slot_mapping,
    query_start_loc,
    num_reqs,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token: its key and value to its slot; zeros to ``out`` if it is padding."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    num_owned = tl.load(query_start_loc + num_reqs)
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    d = tl.arange(0, HEAD_PAD)[None, :]
    e = tl.arange(0, VALUE_PAD)[None, :]
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        there = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
        row = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=there)
        target = key_cache + block * key_block_stride + offset * key_slot_stride
        tl.store(target + head * key_cache_head_stride + d, row, mask=there)
        there = (head < NUM_KV_HEADS) & (e < VALUE_DIM)
        row = tl.load(value + token * value_token_stride + head * value_head_stride + e, mask=there)
        target = value_cache + block * value_block_stride + offset * value_slot_stride
        tl.store(target + head * value_cache_head_stride + e, row, mask=there)
    if token >= num_owned:
        query_head = tl.arange(0, HEADS_PAD)[:, None]
        there = (query_head < NUM_HEADS) & (e < VALUE_DIM)
        zeros = tl.zeros([HEADS_PAD, VALUE_PAD], dtype=out.dtype.element_ty)
        target = out + token * out_token_stride + query_head * out_head_stride + e
        tl.store(target, zeros, mask=there)


def store_kv(key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
    """Store the new rows, and write zeros to the rows of ``batch.out`` that are padding."""
    key_cache, value_cache, out, query_start_loc = batch[:4]
    num_heads, num_kv_heads = out.shape[1], key.shape[1]
    launch(
        store_kernel,
        (key.shape[0],),
        (key, value, key_cache, value_cache, out, batch.slot_mapping, query_start_loc),
        (
            query_start_loc.shape[0] - 1,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
        ),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=key.shape[2],
        VALUE_DIM=value.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        HEADS_PAD=next_power_of_2(num_heads),
        KV_HEADS_PAD=next_power_of_2(num_kv_heads),
        HEAD_PAD=padded_row(key.shape[2]),
        VALUE_PAD=padded_row(value.shape[2]),
        OVERLAP=can_overlap(key.device),
        num_warps=4,
    )
