"""What the ranks of a sharded decoder trade inside a layer; on one rank, nothing."""

from __future__ import annotations

import torch


class Exchange:
    """Of a decoder that has all of its weights: every method gives back what it is given."""

    @property
    def sums(self) -> bool:
        """Whether ``sum`` has anything to add."""
        return False

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks that hold a part of the product ``partial`` comes from."""
        return partial

    def tokens_for_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Before attention: some tokens of many heads -> all tokens of this rank's heads."""
        return query, key, value

    def qkv_for_heads(self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """The same for rows of a product that hold the heads of all three."""
        return qkv

    def heads_for_tokens(self, mixed: torch.Tensor) -> torch.Tensor:
        """After attention: all tokens of this rank's heads -> some tokens of many heads."""
        return mixed


ALONE = Exchange()
