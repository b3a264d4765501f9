"""Derives each layer's attention spec from one recorded call of a transformers model.

A call that our attention cannot express raises here and names the reason, instead of giving wrong
results.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError
from ostinato.models.hf.attention import AttentionCall, MaskRule

# Keyword arguments of an attention call that do not change its result here: the batch is known from
# the forward context, and dropout is off. Any other that is set raises.
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}

# Masks are compared with our specs up to this length.
LONGEST_PROBE = 1 << 20


def bind_specs(
    name: str,
    calls: Sequence[AttentionCall],
    num_layers: int,
    max_position: int,
    recurrent_layers: Collection[int] = (),
) -> list[AttentionSpec]:
    """Derive each layer's spec, and store it on the layer's module for ``ATTENTION``.

    ``recurrent_layers`` need not call attention.
    """
    by_layer: dict[int, AttentionCall] = {}
    for call in calls:
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer in by_layer:
            raise ConfigError(
                f"{name} calls attention more than once in layer {layer}, but the KV cache has "
                "one place per layer; it cannot be run"
            )
        by_layer[layer] = call
    missing = sorted(set(range(num_layers)) - set(by_layer) - set(recurrent_layers))
    if missing or not set(by_layer) <= set(range(num_layers)):
        raise ConfigError(
            f"{name} has {num_layers} layers, of which {missing} did not go through transformers' "
            "AttentionInterface (other attention code, or a state-space, convolutional or "
            "recurrent layer, whose state the KV cache does not hold); it cannot be run"
        )
    windows: dict[int, int | None] = {}
    specs: list[AttentionSpec] = []
    for layer in sorted(by_layer):
        call = by_layer[layer]
        spec = replace(_spec_of(name, call, layer, windows, max_position), layer=len(specs))
        call.module.ostinato_spec = spec  # type: ignore[assignment]
        specs.append(spec)
    return specs


def _spec_of(
    name: str,
    call: AttentionCall,
    layer: int,
    windows: dict[int, int | None],
    max_position: int,
) -> AttentionSpec:
    options = dict(call.options)
    scale, soft_cap = options.pop("scaling", None), options.pop("softcap", None)
    options.pop("s_aux", None)
    options.pop("sliding_window", None)  # the mask is what transformers' own attention goes by
    if options.pop("is_causal", None) is False:
        raise _not_causal(name, layer)
    unknown = {key for key, value in options.items() if value is not None} - HARMLESS
    if unknown:
        raise ConfigError(
            f"{name} passes {sorted(unknown)} to attention in layer {layer}, which is not "
            "supported; it cannot be run"
        )
    for what, value in (("scaling", scale), ("softcap", soft_cap)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(
                f"{name} gives attention in layer {layer} the {what} {value}, which must be a "
                "positive number; it cannot be run"
            )
    if id(call.mask) not in windows:  # layers share a few masks
        windows[id(call.mask)] = _window_of(name, call, layer, max_position)
    head_dim = call.query.shape[3]
    return AttentionSpec(
        layer=layer,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        value_dim=call.value.shape[3],
        scale=float(head_dim**-0.5 if scale is None else scale),
        window=windows[id(call.mask)],
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def _window_of(name: str, call: AttentionCall, layer: int, max_position: int) -> int | None:
    """The window of the model's mask; raises unless the mask is causal, with or without one."""
    if call.mask is None:
        raise _not_causal(name, layer)
    if not isinstance(call.mask, MaskRule):
        raise ConfigError(
            f"{name} passes its own attention mask in layer {layer} (a bias such as ALiBi, or a "
            "mask built by hand); only causal attention, with or without a window, can be run"
        )
    length = min(max_position, LONGEST_PROBE)
    device = call.query.device
    last = torch.tensor([length - 1], device=device)
    window = int(visible(call.mask, last, torch.arange(length, device=device)).sum())
    # Positions around the usual boundaries of windows, chunks and blocks.
    near = torch.arange(-3, 40)
    edges = [near, window + near, 2 * window + near, length - 1 - near]
    queries = torch.cat(edges).clamp(0, length - 1).unique()
    offsets = torch.cat([torch.tensor([0, 1]), torch.arange(-2, 3) + window])
    keys = (queries[:, None] - offsets).clamp(0, length - 1).unique()
    queries, keys = queries.to(device), keys.to(device)
    distance = queries[:, None] - keys
    expected = (distance >= 0) & (distance < window)
    if window < 1 or not torch.equal(visible(call.mask, queries, keys), expected):
        raise _not_causal(name, layer)
    return window if window < length else None


def visible(mask: MaskRule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which of ``keys`` each of ``queries`` sees: [queries, keys]."""
    zero = torch.zeros((), dtype=torch.int64, device=queries.device)
    seen = mask.sees(zero, zero, queries[:, None], keys[None, :])
    return seen.broadcast_to(len(queries), len(keys))


def _not_causal(name: str, layer: int) -> ConfigError:
    return ConfigError(
        f"attention in layer {layer} of {name} is not causal (or is causal by chunks or blocks); "
        "only causal attention, with or without a window, can be run"
    )
