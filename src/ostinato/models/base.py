"""What the runner needs of a language model, whichever way it is implemented."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ostinato.attention.base import AttentionSpec


class CausalLM(Protocol):
    """A causal language model over a flat row of tokens.

    The tokens of all requests stand in one row; ``positions`` says where each belongs in its own
    sequence, and attention (``attend``) keeps the requests apart by the forward context.
    """

    attention_specs: Sequence[AttentionSpec]
    vocab_size: int
    hidden_size: int
    max_position: int  # the longest sequence that the model can take
    dtype: torch.dtype
    device: torch.device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens ``input_ids`` [T] at ``positions`` [T]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size], in float32 or the model's type, of states [B, hidden_size]."""


def num_token_ranks(model: CausalLM) -> int:
    """Among how many ranks ``model`` splits the tokens of a batch."""
    return int(getattr(model, "num_token_ranks", 1))


def with_few_layers(model: CausalLM) -> AbstractContextManager[None]:
    """Inside, ``model`` leaves out the layers that are like others, if it can tell which are.

    What a forward computes is wrong then, but it launches the same kernels and takes as much memory
    at its peak: for warming up, and for measuring.
    """
    few_layers = getattr(model, "few_layers", None)
    return nullcontext() if few_layers is None else few_layers()
