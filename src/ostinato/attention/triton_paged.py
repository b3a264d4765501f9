"""Attention over the paged cache in Triton kernels: for CUDA, in or out of graphs, for any batch.

To torch it is two operators: ``ostinato::triton_paged_attention``, and for models that pass
their raw QKV projection ``ostinato::triton_qkv_attention``. Tile configs are in
``triton.tile_config``, the kernels beside them; Triton is imported when it is first called. CPU
tensors are for the tests, under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.attention.paged import (
    PagedBatch,
    PagedQkvAttention,
    heads_schema,
    over_heads,
    over_qkv,
    qkv_schema,
)
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.tile_config import decode_tile_config, tile_config
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define
from ostinato.ops.triton.launch import (
    can_overlap,
    launch,
    next_power_of_2,
    num_sms,
    overlap,
)


def triton_paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    if query.shape[0] == 0:
        return
    # The kernels step through a row by one.
    query, key, value = (_rows_in_one_piece(tensor) for tensor in (query, key, value))
    _store(key, value, batch)
    if batch.seq_lens.shape[0] > 0:
        _attend(query, batch)


def triton_qkv_attention(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> None:
    """Norm and rotate, store, attend over the cache, and write all of ``out``.

    One kernel does it for decode batches.
    """
    num_tokens, num_reqs = qkv.shape[0], batch.seq_lens.shape[0]
    if num_tokens == 0:
        return
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    if not batch.uniform_decode:
        from ostinato.attention.triton.rotary_store import rotary_store

        query = rotary_store(qkv, positions, rotary, batch)
        if num_reqs > 0:
            _attend(query, batch)
        return
    from ostinato.attention.triton.decode_attention import decode_attention

    key_cache = batch.key_cache
    config = decode_tile_config(
        num_reqs,
        num_heads=batch.out.shape[1],
        num_kv_heads=key_cache.shape[2],
        row_bytes=_padded_row(key_cache) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=batch.block_table.shape[1] * key_cache.shape[1],
        num_sms=num_sms(qkv.device),
    )
    decode_attention(qkv, positions, rotary, batch, config)


def _store(key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
    """The new rows into the cache, and zeros into the rows of ``out`` that are padding."""
    from ostinato.attention.triton.paged_attention import store_kernel

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
        HEAD_PAD=_padded_row(key),
        VALUE_PAD=_padded_row(value),
        OVERLAP=can_overlap(key.device),
        num_warps=4,
    )


def _attend(query: torch.Tensor, batch: PagedBatch) -> None:
    """Attention over what is in the cache."""
    from ostinato.attention.triton.paged_attention import attend_kernel, combine_kernel

    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    num_tokens, num_heads, value_dim = out.shape
    num_kv_heads = key_cache.shape[2]
    num_reqs = query_start_loc.shape[0] - 1
    max_keys = block_table.shape[1] * key_cache.shape[1]
    config = tile_config(
        num_tokens,
        num_reqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        row_bytes=max(_padded_row(key_cache), _padded_row(value_cache)) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=max_keys,
        num_sms=num_sms(query.device),
    )
    num_splits = config.num_splits
    split = num_splits > 1
    partial: tuple[Any, ...] = (None, None, None)
    if split:  # weighted sums of values, highest scores, totals of the weights
        shape = (num_tokens, num_heads, num_splits)
        highest, total = torch.empty((2, *shape), device=out.device, dtype=torch.float32).unbind()
        values = torch.empty((*shape, value_dim), device=out.device, dtype=torch.float32)
        partial = (values, highest, total)
    launch(
        attend_kernel,
        (config.num_tiles * num_kv_heads, num_splits),
        (
            query,
            key_cache,
            value_cache,
            out,
            *partial,
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
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_PAD=_padded_row(query),
        VALUE_PAD=_padded_row(out),
        BLOCK_M=config.block_m,
        BLOCK_Q=config.block_q,
        BLOCK_N=config.block_n,
        SPLIT=split,
        **overlap(out.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        launch(
            combine_kernel,
            (num_tokens, num_heads),
            (*partial, out, query_start_loc),
            (num_reqs, *out.stride()[:2]),
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            VALUE_PAD=_padded_row(out),
            NUM_SPLITS=num_splits,
            **overlap(out.device),
            num_warps=4,
        )


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _padded_row(tensor: torch.Tensor) -> int:
    """Elements of a row as the kernels hold it: a power of 2 that tensor cores take."""
    return max(16, next_power_of_2(tensor.shape[-1]))


_operator = define(
    heads_schema("triton_paged_attention"),
    cpu=over_heads(triton_paged_attention),
    cuda=over_heads(triton_paged_attention),
)
_qkv_operator = define(
    qkv_schema("triton_qkv_attention"),
    cpu=over_qkv(triton_qkv_attention),
    cuda=over_qkv(triton_qkv_attention),
)


class TritonPagedAttention(PagedQkvAttention):
    """The ``AttentionBackend`` for CUDA. Never relies on ``max_seq_len``.

    A replay gives the bits of an eager call with the same padded shapes. Other shapes may be tiled
    differently, and rounded differently; and so may a decode batch that ``forward_qkv`` is given in
    a graph of mixed batches.
    """

    name = "triton"
    support = AttentionCGSupport.ALWAYS

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        _operator(query, key, value, *batch)

    def attend_qkv(
        self, qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
    ) -> None:
        """Decode batches in one kernel, others in three."""
        if qkv.is_cuda:
            # torch.compile does not come here, and CUDA's captures need no operator to see.
            triton_qkv_attention(qkv, positions, rotary, batch)
            return
        _qkv_operator(qkv, positions, rotary.table, rotary.qk_norm, rotary.eps, *batch)
