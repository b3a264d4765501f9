"""Attention on the CPU by kernels that Numba compiles: RoPE, store and attention in one call.

Requests with one query and not too many keys are its own; for the others it does what the torch
backend does, request by request. Which of the two a request gets follows from its own lengths, so
its result is the same to the bit whoever else is in the batch.
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
from ostinato.attention.paged_cpu import attend_requests, read_layout
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.torch_paged import TorchPagedAttention
from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define_for_cpu
from ostinato.ops.numba import load_kernels, runs_compiled

# A kernel is one thread. From about here on two threads of torch's are faster.
MOST_KEYS = 512


class NumbaPagedAttention(PagedQkvAttention):
    """The ``AttentionBackend`` for float32 on a CPU; what is neither goes to the torch backend."""

    name = "numba"
    support = AttentionCGSupport.ALWAYS

    def __init__(self) -> None:
        self._torch = TorchPagedAttention()
        load_kernels()  # compiled now, if they have to be, and not in the first step

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        if not _runs_compiled(batch):
            self._torch.attend(query, key, value, batch)
            return
        heads = query.contiguous(), key.contiguous(), value.contiguous()
        _attention(*heads, *_in_one_piece(batch))

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
            *_in_one_piece(batch),
        )


def _runs_compiled(batch: PagedBatch) -> bool:
    return runs_compiled(batch.out, batch.key_cache, batch.value_cache)


def _in_one_piece(batch: PagedBatch) -> PagedBatch:
    """Everything in one piece and of the type that the kernels take."""
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
            f"a norm of queries and keys has a weight for each head; {tuple(qk_norm.shape)} is not "
            f"that of {num_normed} heads of {head_dim}"
        )
    arrays = *_arrays(qkv, positions, table, qk_norm), rotary.eps, *_batch_arrays(batch)

    def run() -> None:
        if rotary_attention(*arrays):
            _attend_others(batch.out.clone(), batch)

    return run


def _check_shapes(num_queries: int, stored: tuple[int, int], batch: PagedBatch) -> None:
    """The kernels trust what they are given; nothing else would notice a tensor that is short."""
    num_rows, num_heads = batch.out.shape[:2]
    num_slots, num_reqs = batch.slot_mapping.shape[0], batch.seq_lens.shape[0]
    num_starts, num_tables = batch.query_start_loc.shape[0], batch.block_table.shape[0]
    if num_rows != num_queries or any(count != num_slots for count in stored):
        raise BatchError(
            f"{num_queries} queries were given {num_rows} rows for their results, and {num_slots} "
            f"slots tensors of {stored[0]} and {stored[1]} rows"
        )
    if num_starts != num_reqs + 1 or num_tables != num_reqs:
        raise BatchError(
            f"a batch of {num_reqs} requests was given {num_starts} boundaries, which should be "
            f"one more, and {num_tables} rows of the block table"
        )
    if batch.sinks is not None and batch.sinks.shape[0] != num_heads:
        raise BatchError(f"{num_heads} heads were given {batch.sinks.shape[0]} sinks")


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
    """The requests that the kernels leave out."""
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
