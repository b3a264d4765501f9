"""Attention on the CPU by kernels that Numba compiles: RoPE, store and attention in one call.

Its kernels take requests with one query and not too many keys; the others go through the torch
backend's code, request by request. A request's own lengths decide which, so its result is the same
to the bit in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ostinato.attention.paged import (
    PagedBatch,
    PagedQkvAttention,
    heads_schema,
    over_heads,
    over_qkv,
    qkv_schema,
)
from ostinato.attention.reference.latent_cpu import LatentCpuAttention
from ostinato.attention.reference.paged_cpu import attend_requests, read_layout
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.rope import RotaryEmbedding
from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define_for_cpu
from ostinato.ops.numba import load_kernels, runs_compiled

# A kernel is single-threaded. Beyond about this many keys two threads of torch are faster.
MOST_KEYS = 512


class NumbaPagedAttention(LatentCpuAttention, PagedQkvAttention):
    """The ``AttentionBackend`` for float32 on a CPU; anything else goes to the torch backend."""

    name = "numba"
    support = AttentionCGSupport.ALWAYS

    def __init__(self) -> None:
        self._torch = TorchPagedAttention()
        load_kernels()  # compile now if needed, not in the first step

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        if not _runs_compiled(batch):
            self._torch.attend(query, key, value, batch)
            return
        heads = query.contiguous(), key.contiguous(), value.contiguous()
        _attention(*heads, *_contiguous(batch))

    def attend_qkv(
        self, qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
    ) -> None:
        if not _runs_compiled(batch):
            num_heads, num_kv_heads = batch.out.shape[1], batch.key_cache.shape[2]
            heads = rotary.apply(qkv, positions, num_heads=num_heads, num_kv_heads=num_kv_heads)
            self._torch.attend(*heads, batch)
            return
        _rotary_attention(
            qkv.contiguous(),
            positions.to(torch.int64).contiguous(),
            rotary.table,
            rotary.qk_norm,
            rotary.eps,
            *_contiguous(batch),
        )


def _runs_compiled(batch: PagedBatch) -> bool:
    return runs_compiled(batch.out, batch.key_cache, batch.value_cache)


def _contiguous(batch: PagedBatch) -> PagedBatch:
    """The batch with contiguous tensors, of the dtypes that the kernels take."""
    return batch._replace(
        query_start_loc=batch.query_start_loc.contiguous(),
        seq_lens=batch.seq_lens.contiguous(),
        block_table=batch.block_table.contiguous(),
        slot_mapping=batch.slot_mapping.contiguous(),
        sinks=None if batch.sinks is None else batch.sinks.float().contiguous(),
    )


def _prepare_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> Callable[[], None]:
    _check_shapes(query.shape[0], (key.shape[0], value.shape[0]), batch)
    attention = load_kernels().attention
    arrays = *_arrays(query, key, value), *_batch_arrays(batch)

    def run() -> None:
        if attention(*arrays):
            _attend_others(query, batch)

    return run


def _prepare_rotary_attention(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> Callable[[], None]:
    _check_shapes(qkv.shape[0], (qkv.shape[0], positions.shape[0]), batch)
    rotary_attention = load_kernels().rotary_attention
    table, qk_norm = rotary.table, rotary.qk_norm
    head_dim = table.shape[1]
    num_normed = qkv.shape[1] // head_dim - batch.key_cache.shape[2]
    if qk_norm is None:
        qk_norm = qkv.new_empty((num_normed, 0))
    elif qk_norm.shape != (num_normed, head_dim):
        raise ConfigError(
            f"qk_norm has shape {tuple(qk_norm.shape)}; {num_normed} query and key heads of "
            f"{head_dim} need {(num_normed, head_dim)}"
        )
    arrays = *_arrays(qkv, positions, table, qk_norm), rotary.eps, *_batch_arrays(batch)

    def run() -> None:
        if rotary_attention(*arrays):
            _attend_others(batch.out.clone(), batch)

    return run


def _check_shapes(num_queries: int, stored: tuple[int, int], batch: PagedBatch) -> None:
    """The kernels do not check lengths, and nothing else would notice a short tensor."""
    num_rows, num_heads = batch.out.shape[:2]
    num_slots, num_reqs = batch.slot_mapping.shape[0], batch.seq_lens.shape[0]
    num_starts, num_tables = batch.query_start_loc.shape[0], batch.block_table.shape[0]
    if num_rows != num_queries or any(count != num_slots for count in stored):
        raise BatchError(
            f"queries, out, slot_mapping and the tensors to store need one row per token, but have "
            f"{num_queries}, {num_rows}, {num_slots} and {stored[0]}, {stored[1]} rows"
        )
    if num_starts != num_reqs + 1 or num_tables != num_reqs:
        raise BatchError(
            f"a batch of {num_reqs} requests needs {num_reqs + 1} entries in query_start_loc and "
            f"{num_reqs} rows in block_table, got {num_starts} and {num_tables}"
        )
    if batch.sinks is not None and batch.sinks.shape[0] != num_heads:
        raise BatchError(f"{num_heads} heads need {num_heads} sinks, got {batch.sinks.shape[0]}")


def _arrays(*tensors: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.numpy() for tensor in tensors)


def _batch_arrays(batch: PagedBatch) -> tuple[Any, ...]:
    """The batch as the kernels take it."""
    return (
        *_arrays(*batch[:7]),
        np.empty(0, np.float32) if batch.sinks is None else batch.sinks.numpy(),
        (batch.scale, float(batch.window or 0), batch.soft_cap or 0.0),
        MOST_KEYS,
    )


def _attend_others(query: torch.Tensor, batch: PagedBatch) -> None:
    """The requests that the kernels skip."""
    others = [
        queries
        for queries in read_layout(batch).queries
        if queries.query_len > 1 or queries.num_visible(batch.window) > MOST_KEYS
    ]
    attend_requests(others, query, batch)


_attention = define_for_cpu(
    heads_schema("compiled_attention"), prepare=over_heads(_prepare_attention)
)
_rotary_attention = define_for_cpu(
    qkv_schema("compiled_rotary_attention"), prepare=over_qkv(_prepare_rotary_attention)
)
