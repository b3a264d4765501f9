"""Attention over the paged cache in Triton kernels: for CUDA, in or out of graphs, for any batch.

To torch it is two operators: ``ostinato::triton_paged_attention``, and for models that hand over
their raw QKV product ``ostinato::triton_qkv_attention``. How the work is cut up is in ``cuts``, the
work itself in ``triton``; Triton is imported when it is first called. CPU tensors are for the
tests, under Triton's interpreter.
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
from ostinato.attention.rotation import Rotation
from ostinato.attention.triton.cuts import cut, decode_cut
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define
from ostinato.ops.triton.launch import (
    can_overlap,
    launch,
    next_power_of_2,
    num_processors,
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
    qkv: torch.Tensor, positions: torch.Tensor, rotation: Rotation, batch: PagedBatch
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

        query = rotary_store(qkv, positions, rotation, batch)
        if num_reqs > 0:
            _attend(query, batch)
        return
    from ostinato.attention.triton.decode_attention import decode_attention

    key_cache = batch.key_cache
    pieces = decode_cut(
        num_reqs,
        num_heads=batch.out.shape[1],
        num_kv_heads=key_cache.shape[2],
        row_bytes=_padded_row(key_cache) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=batch.block_table.shape[1] * key_cache.shape[1],
        num_processors=num_processors(qkv.device),
    )
    decode_attention(qkv, positions, rotation, batch, pieces)


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
    from ostinato.attention.triton.paged_attention import attend_kernel, join_kernel

    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    num_tokens, num_heads, value_dim = out.shape
    num_kv_heads = key_cache.shape[2]
    num_reqs = query_start_loc.shape[0] - 1
    max_keys = block_table.shape[1] * key_cache.shape[1]
    pieces = cut(
        num_tokens,
        num_reqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        row_bytes=max(_padded_row(key_cache), _padded_row(value_cache)) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=max_keys,
        num_processors=num_processors(query.device),
    )
    num_splits = pieces.num_splits
    split = num_splits > 1
    partial: tuple[Any, ...] = (None, None, None)
    if split:  # weighted sums of values, highest scores, totals of the weights
        shape = (num_tokens, num_heads, num_splits)
        highest, total = torch.empty((2, *shape), device=out.device, dtype=torch.float32).unbind()
        values = torch.empty((*shape, value_dim), device=out.device, dtype=torch.float32)
        partial = (values, highest, total)
    launch(
        attend_kernel,
        (pieces.num_tiles * num_kv_heads, num_splits),
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
        BLOCK_M=pieces.block_m,
        BLOCK_Q=pieces.block_q,
        BLOCK_N=pieces.block_n,
        SPLIT=split,
        **overlap(out.device),
        num_warps=pieces.num_warps,
        num_stages=pieces.num_stages,
    )
    if split:
        launch(
            join_kernel,
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

    A replay gives the bits of an eager call with the same padded shapes. Other shapes may be cut up
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
        self, qkv: torch.Tensor, positions: torch.Tensor, rotation: Rotation, batch: PagedBatch
    ) -> None:
        """Decode batches in one kernel, others in three."""
        if qkv.is_cuda:
            # torch.compile does not come here, and CUDA's captures need no operator to see.
            triton_qkv_attention(qkv, positions, rotation, batch)
            return
        _qkv_operator(qkv, positions, rotation.table, rotation.qk_norm, rotation.eps, *batch)
