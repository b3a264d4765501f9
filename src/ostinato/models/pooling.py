"""From the states of a sequence's tokens to one state: its first, its last, or their mean."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ostinato.attention.packed import PackedBatch

Pooling = Literal["cls", "last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def pool(hidden: torch.Tensor, batch: PackedBatch, pooling: Pooling) -> torch.Tensor:
    """One float32 state for each sequence of ``batch`` [B, hidden_size] from ``hidden`` [T, ...].

    Rows after the last sequence are padding. The result is new memory.
    """
    starts, ends = batch.starts[:-1].long(), batch.starts[1:].long()
    if pooling == "cls":
        return hidden[starts].float()
    if pooling == "last":
        return hidden[ends - 1].float()
    states = hidden[: batch.num_tokens].float()
    return torch.segment_reduce(states, "mean", lengths=ends - starts, axis=0, unsafe=True)
