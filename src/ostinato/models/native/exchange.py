"""The communication of a sharded decoder inside a layer; on one rank, none."""

from __future__ import annotations

import torch


class Exchange:
    """The exchange of a decoder with all its weights: every method returns its argument."""

    @property
    def sums(self) -> bool:
        """Whether ``sum`` adds anything."""
        return False

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of ``partial`` over all ranks that compute a part of the GEMM."""
        return partial

    def add_in_order(self) -> None:
        """From now on, add up the ranks' parts in their order, however large these are."""

    def mean(self, partial: torch.Tensor) -> torch.Tensor:
        """The mean of ``partial`` over the same ranks."""
        return partial

    @property
    def gathers(self) -> bool:
        """Whether experts run the tokens of other replicas too."""
        return False

    def slots_of_all(self, slots: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
        """The slots of all replicas' tokens, from those of this one's ``num_tokens``."""
        return slots

    def tokens_of_all(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The rows of all replicas, in the order of ``slots``, which ``slots_of_all`` returned."""
        return x

    def own_tokens(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """What each replica's experts add to this one's tokens: [replicas, num_tokens, N]."""
        return y.unsqueeze(0)

    def tokens_for_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Before attention: some tokens of many heads -> all tokens of this rank's heads."""
        return query, key, value

    def qkv_for_heads(self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """The same for rows of a GEMM that hold the heads of all three."""
        return qkv

    def latent_for_heads(
        self, query: torch.Tensor, row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Before latent attention: the same for queries, with the rows of all tokens.

        ``query`` [T, heads, query_dim]; ``row`` [T, N], which all heads share.
        """
        return query, row

    def own_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        """Of a tensor with a row per head of the shard, the rows of this rank's heads."""
        return per_head

    def heads_for_tokens(self, mixed: torch.Tensor) -> torch.Tensor:
        """After attention: all tokens of this rank's heads -> some tokens of many heads."""
        return mixed


ALONE = Exchange()
