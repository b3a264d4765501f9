"""The head of a transformers model: everything after its decoder, or its encoder.

Models scale, cap and project their logits in different ways, in their ``forward``. That code runs
unchanged, with a decoder that returns the hidden states it is given.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ostinato.errors import ConfigError


class _GivenStates(nn.Module):
    """Replaces ``decoder``: returns the hidden states that it is given as embeddings.

    ``pooler``: the decoder's layer for a head that reads one state of a sequence, as in BERT. A
    head may also read the decoder's settings, such as a multiplier.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(decoder, "pooler", None)
        self.__dict__["decoder"] = decoder  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        if name in self._modules:
            return self._modules[name]
        return getattr(self.__dict__["decoder"], name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _GivenOutputs:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return _GivenOutputs(inputs_embeds, pooled)


class _GivenOutputs:
    """A decoder's outputs: hidden states, and None for anything else a head may pass on."""

    def __init__(self, hidden: torch.Tensor, pooled: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden
        self.pooler_output = pooled

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pooler_output is None:
            return (self.last_hidden_state,)[index]
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:
        return None


def decoder_of(model: Any) -> Any:
    """The part of ``model`` that computes hidden states from tokens."""
    # For a few models, transformers' rules find the head, or the whole model.
    for candidate in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(candidate, PreTrainedModel) and candidate is not model:
            return candidate
    raise ConfigError(f"{type(model).__name__} has no decoder apart from its head")


def head_of(model: Any, decoder: nn.Module) -> Any:
    """The part of ``model`` after its decoder; takes hidden states as ``inputs_embeds``.

    It shares ``model``'s weights, and leaves ``model`` unchanged.
    """
    path = next(name for name, module in model.named_modules() if module is decoder)
    parts = path.split(".")
    owner = changed = _shallow_copy(model)
    for part in parts[:-1]:
        owner._modules[part] = _shallow_copy(owner._modules[part])
        owner = owner._modules[part]
    owner._modules[parts[-1]] = _GivenStates(decoder)
    return changed


def _shallow_copy(module: nn.Module) -> Any:
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone
