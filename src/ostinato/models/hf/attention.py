"""Our attention inside transformers' modules.

Two implementations are registered with transformers. ``ATTENTION`` runs the model: it passes the
layer's query, key and value to ``attend``. ``DISCOVERY`` runs a few tokens when a model is loaded:
it records how every layer calls attention, with the model's mask function; ``specs.py`` derives the
layers' specs from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ostinato.attention.base import AttentionMetadata, AttentionSpec, attend
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport

ATTENTION = "ostinato"
DISCOVERY = "ostinato_discovery"

_USES_MASK = "it computes with its attention mask, and none is made"


@dataclass(frozen=True, eq=False)
class MaskRule:
    """Replaces the mask: tells which keys the model lets a query see."""

    sees: Callable[..., torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_USES_MASK)

    def __getitem__(self, index: object) -> Any:
        raise TypeError(_USES_MASK)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """The arguments of one layer's attention call. T tokens in one row."""

    module: nn.Module
    query: torch.Tensor  # [1, num_heads, T, head_dim]
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any] = field(default_factory=dict)


_calls: ContextVar[list[AttentionCall]] = ContextVar("ostinato_attention_calls")


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: [1, heads, T, dim] in, [1, T, heads, dim] out, no weights."""
    refuse_mask(module, attention_mask)
    spec: Any = module.ostinato_spec
    return attend(spec, rows_of(query), rows_of(key), rows_of(value), s_aux).unsqueeze(0), None


def refuse_mask(module: nn.Module, attention_mask: torch.Tensor | None) -> None:
    """Raises ConfigError for a mask: what a token sees was found out when the model was loaded."""
    if attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} passed an attention mask, which it did not do when the model "
            "was loaded; masks that depend on the batch are not supported"
        )


def _note_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _calls.get().append(
        AttentionCall(
            module=module,
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            options=options,
        )
    )
    return TokenByToken.attend(rows_of(query), rows_of(key), rows_of(value)).unsqueeze(0), None


def rows_of(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] -> [T, heads, dim]"""
    return states.squeeze(0).transpose(0, 1)


def _note_mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> MaskRule:
    return MaskRule(mask_function)


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(DISCOVERY, _note_attention)
# ATTENTION deliberately has no mask function: transformers then builds no mask, and does not read
# the positions for one.
AttentionMaskInterface.register(DISCOVERY, _note_mask)


class TokenByToken:
    """A replacement for attention in which no token sees another, to check the rest of a model.

    Its result depends on the query and the key separately, not only on their product, so that it
    shows which position RoPE gave them.
    """

    name = "token by token"
    support = AttentionCGSupport.ALWAYS

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        out.copy_(self.attend(query, key, value))

    @staticmethod
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        gate = 1 + query.mean(-1, keepdim=True).tanh()
        gate = gate + key.mean(-1, keepdim=True).tanh().repeat_interleave(groups, dim=1)
        return gate * value.repeat_interleave(groups, dim=1)


@contextmanager
def record_calls(calls: list[AttentionCall]) -> Iterator[None]:
    """Append to ``calls`` the attention calls of a model that runs under ``DISCOVERY``."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)
