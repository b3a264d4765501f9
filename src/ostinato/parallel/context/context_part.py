"""Which tokens of a request a rank stores, when ranks split the KV cache: arithmetic only."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ContextPart(NamedTuple):
    """The part of ``rank`` if tokens are dealt out to ``size`` ranks, ``interleave`` at a time."""

    size: int
    rank: int
    interleave: int

    def local_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first ``seq_lens`` tokens are in this part: ``dcp_local_seq_lens``."""
        turn = self.size * self.interleave
        rest = seq_lens % turn - self.rank * self.interleave
        return seq_lens // turn * self.interleave + rest.clamp(0, self.interleave)

    def max_local_len(self, max_seq_len: int) -> int:
        """An upper limit of ``local_seq_lens`` for sequences of up to ``max_seq_len``."""
        return -(-max_seq_len // (self.size * self.interleave)) * self.interleave

    def positions(self, index: torch.Tensor) -> torch.Tensor:
        """The positions of this part's tokens with these indices among its tokens."""
        turn = index // self.interleave
        return (turn * self.size + self.rank) * self.interleave + index % self.interleave

    def local_slots(self, slot_mapping: torch.Tensor, block_slots: int) -> torch.Tensor:
        """The slots of this part for the slots of the whole; -1 for padding and other parts.

        ``block_slots``: slots of a block in each part.
        """
        whole = block_slots * self.size
        block, offset = slot_mapping // whole, slot_mapping % whole
        turn, place = offset // self.interleave, offset % self.interleave
        local = block * block_slots + turn // self.size * self.interleave + place
        is_own = (slot_mapping >= 0) & (turn % self.size == self.rank)
        return torch.where(is_own, local, -1)
