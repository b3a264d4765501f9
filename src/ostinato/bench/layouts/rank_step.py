"""Steps of one rank without the others: silent collectives, a KV cache, batches of both kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.planner.cost import Kind
from ostinato.runner.kv_cache import KVCache, bytes_per_block

BLOCK_SIZE = 16
# Requests share blocks if a cache for all of them would be larger. This size is still read from
# memory and not from a GPU's cache, layer by layer.
_CUDA_CACHE_BYTES, _CPU_CACHE_BYTES = 32 * 2**30, 64 * 2**20


class SilentComm:
    """A group without other ranks: results have the right shape, and arbitrary values."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.size = len(ranks)
        self.index = list(ranks).index(rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= self.size
        return tensor.new_empty(shape)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[split_dim] //= self.size
        shape[concat_dim] *= self.size
        return tensor.reshape(shape)  # the element count is unchanged, so nothing is copied


class DrawnComm(SilentComm):
    """Replicas without the others: the rows of all are drawn once, so that routers spread them.

    As of tokens behind a norm, and with slots of real tokens.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self._drawn: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        assert dim == 0, "replicas gather rows"
        key, num_rows = (tensor.shape[1:], tensor.dtype), self.size * tensor.shape[0]
        rows = self._drawn.get(key)
        if rows is None or rows.shape[0] < num_rows:
            rows = tensor.new_zeros((num_rows, *key[0]))
            if rows.is_floating_point():
                rows.normal_()
            self._drawn[key] = rows
        return rows[:num_rows]


class Batch(NamedTuple):
    """The inputs of a step, padded."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata


def make_cache(
    specs: Sequence[AttentionSpec],
    *,
    max_tokens: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KVCache:
    """A cache for ``max_tokens`` requests of ``context`` tokens, or as many as a limit allows."""
    limit = _CUDA_CACHE_BYTES if device.type == "cuda" else _CPU_CACHE_BYTES
    wanted = max(max_tokens * _num_blocks(context), _num_blocks(max_tokens))
    affordable = limit // bytes_per_block(specs, BLOCK_SIZE, dtype)
    cache = KVCache(
        specs,
        num_blocks=1 + max(1, min(wanted, affordable)),
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=device,
    )
    for layer in cache.layers:
        for tensor in layer:
            tensor.normal_()  # zeros are read a little faster
    return cache


def make_batch(
    kind: Kind,
    num_tokens: int,
    padded_tokens: int,
    *,
    context: int,
    vocab_size: int,
    cache: KVCache,
    attention: AttentionBackend,
) -> Batch:
    """A decode batch of requests with ``context`` keys each, or a prefill of one prompt."""
    decode = kind == "decode"
    num_reqs, keys = (num_tokens, context) if decode else (1, num_tokens)
    rows = padded_tokens if decode else 1  # each padding token is a request too
    device = cache.layers[0][0].device

    query_lens = torch.zeros(rows, dtype=torch.int32)
    query_lens[:num_reqs] = num_tokens // num_reqs
    seq_lens = torch.zeros(rows, dtype=torch.int32)
    seq_lens[:num_reqs] = keys
    spare = cache.layers[0][0].shape[0] - 1  # all blocks but the first, which is reserved
    table = 1 + torch.arange(rows * _num_blocks(keys)).view(rows, -1) % spare
    owners = torch.arange(num_tokens) if decode else torch.zeros(num_tokens, dtype=torch.int64)
    places = torch.full((num_tokens,), keys - 1) if decode else torch.arange(num_tokens)
    slots = torch.full((padded_tokens,), -1)
    slots[:num_tokens] = table[owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    positions = torch.zeros(padded_tokens, dtype=torch.int64)
    positions[:num_tokens] = places
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1:] = query_lens.cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=seq_lens.to(device),
        block_table=table.to(device, torch.int32),
        slot_mapping=slots.to(device),
        max_query_len=num_tokens // num_reqs,
        max_seq_len=keys,
        kv_caches=cache.layers,
        backend=attention,
        uniform_decode=decode,
    )
    ids = torch.arange(padded_tokens, device=device) % vocab_size
    return Batch(ids, positions.to(device), metadata)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
