"""Attention whose every result has the same bits in any batch, chunk, and behind any prefix.

On CUDA: the kernels of ``triton.invariant_attention``. On the CPU: each query by itself, over its
own keys; a query at position n is the same computation in a prompt as in a decode step.
"""

from __future__ import annotations

import torch

from ostinato.attention.paged import (
    PagedBatch,
    PagedQkvAttention,
    heads_schema,
    over_heads,
    over_qkv,
    qkv_schema,
)
from ostinato.attention.reference.paged_cpu import Queries, read_layout, store_kv_cpu
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.invariant_tiles import invariant_tiles
from ostinato.attention.triton.tile_config import BatchShape
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define
from ostinato.ops.triton.launch import num_sms


def attend_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    store_kv_cpu(key, value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    layout = read_layout(batch)
    if layout.has_padding:
        batch.out.zero_()  # rows that belong to no request
    for queries in layout.queries:
        _attend_request(queries, query, batch)


def attend_qkv_cpu(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> None:
    """The same from the raw QKV, with its norm and RoPE."""
    if qkv.shape[0] == 0:
        return
    num_heads, num_kv_heads = batch.out.shape[1], batch.key_cache.shape[2]
    heads = [
        rotary.apply(row.clone(), position, num_heads=num_heads, num_kv_heads=num_kv_heads)
        for row, position in zip(qkv.split(1), positions.split(1), strict=True)
    ]
    query, key, value = map(torch.cat, zip(*heads, strict=True))
    attend_cpu(query, key, value, batch)


def attend_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    from ostinato.attention.triton_paged import store_heads

    if query.shape[0] == 0:
        return
    store_heads(key, value, batch)
    _attend_cuda(query if query.stride(-1) == 1 else query.contiguous(), batch)


def attend_qkv_cuda(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> None:
    """The same from the raw QKV, with its norm and RoPE."""
    from ostinato.attention.triton_paged import store_qkv

    if qkv.shape[0]:
        _attend_cuda(store_qkv(qkv, positions, rotary, batch), batch)


def _attend_cuda(query: torch.Tensor, batch: PagedBatch) -> None:
    """Attend over what is in the cache. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.attention.triton.invariant_attention import invariant_attention

    if batch.seq_lens.shape[0]:
        shape = BatchShape.of(batch, num_sms(query.device))
        invariant_attention(query, batch, invariant_tiles(shape, batch.uniform_decode))


def _attend_request(queries: Queries, query: torch.Tensor, batch: PagedBatch) -> None:
    keys, values = batch.key_cache, batch.value_cache
    if queries.blocks is not None:
        keys, values = (cache.index_select(0, queries.blocks) for cache in (keys, values))
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    for row in range(queries.query_len):
        position = queries.seq_len - queries.query_len + row
        first = 0 if batch.window is None else max(0, position - batch.window + 1)
        seen = slice(queries.origin + first, queries.origin + position + 1)
        token = queries.start + row
        batch.out[token] = _attend_one(query[token], keys[seen], values[seen], batch)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch
) -> torch.Tensor:
    """One query [H, D] over the keys [n, KV heads, D] that it sees; all copied, all in float32."""
    num_kv_heads = keys.shape[1]
    grouped = _copied(query.unflatten(0, (num_kv_heads, -1)))
    transposed = _copied(keys.permute(1, 2, 0))
    scores = torch.bmm(grouped, transposed).mul_(batch.scale)
    if batch.soft_cap is not None:
        scores = scores.div_(batch.soft_cap).tanh_().mul_(batch.soft_cap)
    if batch.sinks is not None:
        sinks = batch.sinks.float().view(num_kv_heads, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].contiguous()
    else:
        weights = scores.softmax(-1)
    own = _copied(values.permute(1, 0, 2))
    return torch.bmm(weights, own).flatten(0, 1).to(query.dtype)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In new memory, so that where it was has no influence on how it is read."""
    return torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor)


_operator = define(
    heads_schema("invariant_attention"),
    cpu=over_heads(attend_cpu),
    cuda=over_heads(attend_cuda),
)
_qkv_operator = define(
    qkv_schema("invariant_qkv_attention"),
    cpu=over_qkv(attend_qkv_cpu),
    cuda=over_qkv(attend_qkv_cuda),
)


class InvariantAttention(PagedQkvAttention):
    """The ``AttentionBackend`` of ``batch_invariant``. Never relies on ``max_seq_len``."""

    name = "invariant"
    support = AttentionCGSupport.ALWAYS

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        _operator(query, key, value, *batch)

    def attend_qkv(
        self, qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
    ) -> None:
        if qkv.is_cuda:
            # A CUDA capture needs no operator to record.
            attend_qkv_cuda(qkv, positions, rotary, batch)
            return
        _qkv_operator(qkv, positions, rotary.table, rotary.qk_norm, rotary.eps, *batch)
