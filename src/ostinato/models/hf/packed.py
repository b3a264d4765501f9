"""Attention over packed sequences inside transformers' modules.

``PACKED`` is registered with transformers and passes each layer's query, key and value to
``attend_packed``. What a layer's queries see (all, what is before, a window) is derived from one
recorded call with the model's mask function, and raises if our attention cannot express it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from ostinato.attention.packed import PackedSpec, attend_packed
from ostinato.errors import ConfigError
from ostinato.models.hf.attention import AttentionCall, MaskRule, TokenByToken, refuse_mask, rows_of
from ostinato.models.hf.specs import HARMLESS, LONGEST_PROBE, visible

PACKED = "ostinato_packed"


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: [1, heads, T, dim] in, [1, T, heads, dim] out, no weights."""
    refuse_mask(module, attention_mask)
    spec: Any = module.ostinato_packed
    attended = attend_packed(spec, rows_of(query), rows_of(key), rows_of(value))
    return attended.unsqueeze(0), None


# No mask function: transformers then builds no mask.
AttentionInterface.register(PACKED, packed_attention)


class TokensApart:
    """A batch in which no token sees another, to check the rest of a model."""

    def attend(
        self,
        spec: PackedSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        out.copy_(TokenByToken.attend(query, key, value))


def bind_packed_specs(
    name: str, calls: Sequence[AttentionCall], num_layers: int, max_position: int
) -> list[PackedSpec]:
    """The spec of each call, stored on its module for ``PACKED``."""
    if len(calls) != num_layers:
        raise ConfigError(
            f"{name} has {num_layers} layers and calls attention {len(calls)} times through "
            "transformers' AttentionInterface; it cannot be run"
        )
    reaches: dict[int, tuple[int | None, int | None]] = {}
    specs = []
    for call in calls:
        if id(call.mask) not in reaches:  # layers share a few masks
            reaches[id(call.mask)] = _reach(name, call, max_position)
        left, right = reaches[id(call.mask)]
        spec = PackedSpec(scale=_scale(name, call), left=left, right=right)
        call.module.ostinato_packed = spec  # type: ignore[assignment]
        specs.append(spec)
    return specs


def _scale(name: str, call: AttentionCall) -> float:
    options = dict(call.options)
    scale = options.pop("scaling", None)
    for stated_elsewhere in ("sliding_window", "is_causal", "deterministic"):  # by the mask
        options.pop(stated_elsewhere, None)
    unknown = {key for key, value in options.items() if value is not None} - HARMLESS
    if unknown:
        raise ConfigError(
            f"{name} passes {sorted(unknown)} to attention, which is not supported without a KV "
            "cache; it cannot be run"
        )
    return float(call.query.shape[3] ** -0.5 if scale is None else scale)


def _reach(name: str, call: AttentionCall, max_position: int) -> tuple[int | None, int | None]:
    """How far queries see to the left and to the right; None: to the end of the sequence."""
    if call.mask is None and getattr(call.module, "is_causal", None) is False:
        return None, None
    if not isinstance(call.mask, MaskRule):
        raise ConfigError(
            f"{name} passes its own attention mask (a bias such as ALiBi or relative positions, or "
            "a mask built by hand); it cannot be run"
        )
    length, device = min(max_position, LONGEST_PROBE), call.query.device
    keys = torch.arange(length, device=device)
    first, last = (visible(call.mask, keys[at : at + 1], keys)[0] for at in (0, length - 1))
    right, left = int(first.sum()) - 1, int(last.sum()) - 1
    # Positions around the edges of the windows.
    near = torch.arange(-3, 40, device=device)
    edges = [near, left + near, right + near, length - 1 - near]
    queries = torch.cat(edges).clamp(0, length - 1).unique()
    few = torch.arange(-2, 3, device=device)
    offsets = torch.cat([few, few - left, few + right])
    keys = (queries[:, None] + offsets).clamp(0, length - 1).unique()
    ahead = keys - queries[:, None]
    expected = (ahead >= -left) & (ahead <= right)
    if not torch.equal(visible(call.mask, queries, keys), expected):
        raise ConfigError(
            f"attention in {name} goes by chunks or blocks; only full and causal attention, with "
            "or without a window, can be run"
        )
    whole = length - 1
    return (None if left == whole else left), (None if right == whole else right)
