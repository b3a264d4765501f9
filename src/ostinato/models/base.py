"""What the runner needs of a language model, whichever way it is implemented."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ostinato.attention.base import AttentionSpec


class CausalLM(Protocol):
    """A causal language model over a flat row of tokens. Models derive from it, for its defaults.

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

    # --- what a model may offer besides -----------------------------------------------------------

    @property
    def num_token_ranks(self) -> int:
        """The number of ranks that the tokens of a batch are split over."""
        return 1

    @property
    def selects_tokens(self) -> bool:
        """Whether a batch should say, by ``AttentionMetadata.logits_indices``, which tokens' states
        will be read. The model then runs only some of its layers for the others.
        """
        return False

    def few_layers(self) -> AbstractContextManager[None]:
        """Inside, the model leaves out layers that are like others, if it can tell which are.

        What a forward computes is wrong then, but it launches the same kernels and takes as much
        memory at its peak: for warming up, and for measuring.
        """
        return nullcontext()
