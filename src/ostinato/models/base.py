"""The interfaces of the models that the runners can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError
from ostinato.graphs.capture.pool import WeightOffloader
from ostinato.ops.gemm.tile_config import LinearShape
from ostinato.recurrent.base import RecurrentSpec


class Adapters(Protocol):
    """LoRA adapters of a model's linears."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All memory that layers read, by name."""


class CausalLM(Protocol):
    """A causal language model over a flat row of tokens. Models derive from it, for its defaults.

    The tokens of all requests are in one row; ``positions`` holds the position of each in its
    sequence, and attention (``attend``) separates the requests by the forward context.
    """

    attention_specs: Sequence[AttentionSpec]
    vocab_size: int
    hidden_size: int
    max_position: int  # the longest sequence the model supports
    dtype: torch.dtype
    device: torch.device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens ``input_ids`` [T] at ``positions`` [T].

        With M-RoPE, ``positions`` is [3, T].
        """

    @property
    def module(self) -> nn.Module:
        """The module that has its weights: itself, or transformers' module inside it."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size], in float32 or the model's dtype, of states [B, hidden_size]."""

    # --- optional features ------------------------------------------------------------------------

    offloader: WeightOffloader | None = None  # copies weights to the device during a forward
    adapters: Adapters | None = None  # what its linears add for some rows of a batch
    recurrent_specs: Sequence[RecurrentSpec] = ()  # of layers with a state per request
    batch_invariant: bool = False  # the bits of a row do not depend on the rows around it
    # Where torch.compile splits the forward: operators that read the forward context.
    splitting_ops: Sequence[str] = ("ostinato::attend",)

    @property
    def num_token_ranks(self) -> int:
        """The number of ranks that the tokens of a batch are split over."""
        return 1

    @property
    def uses_mrope(self) -> bool:
        """Whether a token has three positions: in time, by height and by width (M-RoPE).

        Such a model may take images, and is then a ``VisionLM``.
        """
        return False

    @property
    def selects_tokens(self) -> bool:
        """Whether a batch should list the tokens whose states will be read.

        The list is ``AttentionMetadata.logits_indices``. The model then skips some of its layers
        for the other tokens.
        """
        return False

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """How many tokens chose each expert, by layer; padding does not count.

        Since the model was built or the last ``reset``. Waits for the device. Empty if the model
        has no experts, or runs them in code that does not count.
        """
        del reset
        return {}

    def tunable_gemms(self) -> Mapping[LinearShape, Sequence[torch.Tensor]]:
        """The weights of its small-M GEMMs, by what tile configs depend on.

        In the order of a decode step. Empty if torch runs all of them.
        """
        return {}

    def set_aux_hidden_states(self, states: Mapping[int, torch.Tensor]) -> None:
        """From now on, copy the input of some layers to ``states``, by layer, in every forward.

        Each is [at least T, hidden_size]. Set before the first forward is captured.
        """
        raise ConfigError(
            f"{type(self).__name__} does not expose its layers' hidden states; models of the "
            "native decoder do"
        )

    def few_layers(self) -> AbstractContextManager[None]:
        """Inside, the model skips layers that are like others, if it can tell which are.

        The results are then wrong, but a forward launches the same kernels and has the same peak
        memory: for warm-ups and measurements.
        """
        return nullcontext()


class Encoder(Protocol):
    """A model over a flat row of packed sequences, which attention (``attend_packed``) separates.

    ``first_position``: the number of the first token of each sequence.
    """

    vocab_size: int
    device: torch.device
    first_position: int

    @property
    def module(self) -> nn.Module:
        """The module that has its weights."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a row of tokens; all arguments are [T]."""
