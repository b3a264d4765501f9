"""The communication of a sharded decoder inside a layer: all-reduces, and tokens for heads."""

from __future__ import annotations

import torch

from ostinato.models.native.exchange import Exchange
from ostinato.parallel.comm import Comm


class TensorExchange(Exchange):
    """The exchange of a decoder sharded by heads and by the width of its feed-forward layers."""

    def __init__(self, tensor: Comm) -> None:
        self._tensor = tensor

    @property
    def sums(self) -> bool:
        return self._tensor.size > 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return self._tensor.all_reduce(partial) if self.sums else partial

    def mean(self, partial: torch.Tensor) -> torch.Tensor:
        return self.sum(partial) / self._tensor.size


class UlyssesExchange(TensorExchange):
    """The exchange with the tokens of a batch also split over the ranks of ``sequence``.

    A rank computes its tokens for all heads of its shard; attention needs all tokens, and is
    computed for one block of heads. One all-to-all carries query, key and value.
    """

    def __init__(self, tensor: Comm, sequence: Comm) -> None:
        super().__init__(tensor)
        self._sequence = sequence

    def tokens_for_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = [heads.shape[1] // self._sequence.size for heads in (query, key, value)]
        query, key, value = self._trade(query, key, value).split(counts, dim=1)
        return query, key, value

    def qkv_for_heads(self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        return self._trade(*heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)).flatten(1)

    def _trade(self, *all_heads: torch.Tensor) -> torch.Tensor:
        # Heads are stored block after block, so a block is a range of each of query, key, value.
        blocks = [heads.unflatten(1, (self._sequence.size, -1)) for heads in all_heads]
        joined = torch.cat(blocks, dim=2)
        return self._sequence.all_to_all(joined, split_dim=1, concat_dim=0).squeeze(1)

    def own_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        return per_head.chunk(self._sequence.size)[self._sequence.index]

    def heads_for_tokens(self, mixed: torch.Tensor) -> torch.Tensor:
        return self._sequence.all_to_all(mixed, split_dim=0, concat_dim=1)
