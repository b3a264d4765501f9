"""Requests over one paged cache, run piece by piece: batches whose padding is poisoned.

Unowned cache slots are NaN, and unused table entries point to unowned blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.selected import last_tokens
from ostinato.runner.kv_cache import KVCache

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Piece:
    """``count`` tokens of request ``request``, from position ``start`` on."""

    request: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class Batch:
    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata

    def tensors(self) -> list[torch.Tensor]:
        """Everything that a graph finds at a fixed address, except the cache."""
        metadata = self.metadata
        found = [self.input_ids, self.positions, metadata.query_start_loc, metadata.seq_lens]
        found += [metadata.block_table, metadata.slot_mapping]
        return found if metadata.logits_indices is None else [*found, metadata.logits_indices]

    def refill(self, other: Batch) -> None:
        """The contents of ``other``, of the same padded shapes, at this batch's addresses."""
        for mine, its in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(its)


class PagedRequests:
    """Blocks are assigned to requests in turn, from the last block down."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        tokens: Sequence[Sequence[int]],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tokens = tokens
        self.device = device
        self.blocks_each = -(-max(map(len, tokens)) // BLOCK_SIZE)
        self.num_blocks = self.blocks_each * len(tokens) + 1
        self.cache = KVCache(
            specs, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=device
        )
        for tensor in (tensor for layer in self.cache.layers for tensor in layer):
            tensor.fill_(float("nan"))

    def block(self, request: int, index: int) -> int:
        return self.num_blocks - 1 - index * len(self.tokens) - request

    def slots(self, piece: Piece) -> list[int]:
        return [
            self.block(piece.request, position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(piece.start, piece.end)
        ]

    def batch(
        self,
        pieces: Sequence[Piece],
        *,
        padded_tokens: int | None = None,
        padded_reqs: int | None = None,
        num_selected: int | None = None,
        backend: Any = None,
    ) -> Batch:
        """``num_selected``: number of selected tokens, including padding; None for no selection."""
        num_tokens = sum(piece.count for piece in pieces)
        padding = (padded_tokens or num_tokens) - num_tokens
        num_reqs = padded_reqs or len(pieces)

        def row(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + piece.count)
        starts += [starts[-1]] * (num_reqs - len(pieces))
        # Block 0 belongs to no request and is full of NaN.
        table = torch.zeros(num_reqs, self.blocks_each, dtype=torch.int32)
        for index, piece in enumerate(pieces):
            for block in range(-(-piece.end // BLOCK_SIZE)):
                table[index, block] = self.block(piece.request, block)
        ids = [token for p in pieces for token in self.tokens[p.request][p.start : p.end]]
        positions = [position for p in pieces for position in range(p.start, p.end)]
        lengths = [piece.end for piece in pieces] + [0] * (num_reqs - len(pieces))
        slots = [slot for piece in pieces for slot in self.slots(piece)]
        query_start_loc = row(starts, torch.int32)
        indices = None
        if num_selected is not None:
            indices = last_tokens(query_start_loc, row([77] * num_selected))
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=row(lengths, torch.int32),
            block_table=table.to(self.device),
            slot_mapping=row(slots + [-1] * padding),
            max_query_len=max(piece.count for piece in pieces),
            max_seq_len=self.blocks_each * BLOCK_SIZE,
            kv_caches=self.cache.layers,
            backend=TorchPagedAttention() if backend is None else backend,
            logits_indices=indices,
        )
        return Batch(row(ids + [1] * padding), row(positions + [0] * padding), metadata)

    def stored(self, layer: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [count, num_kv_heads, head_dim] of the piece's positions."""
        slots = torch.tensor(self.slots(piece), device=self.device)
        keys, values = self.cache.layers[layer]
        return keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]

    def num_written(self, layer: int) -> int:
        """Slots of the cache that are no longer NaN throughout."""
        keys, _ = self.cache.layers[layer]
        return int((~keys.isnan()).flatten(0, 1).flatten(1).any(1).sum())
