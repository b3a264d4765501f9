"""What the native decoder knows of a family of models: ``Family``, and options that several share.

A family lists the options of ``DecoderConfig`` in which its models differ from Llama, and the names
of the weights in their checkpoints. The names determine the norms of a layer: before attention and
before the MLP (pre-norm, as in Llama), after each (post-norm, as in OLMo 2), or both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Types = tuple[type, ...]


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The checkpoint names of a layer's weights. A norm without a name does not exist.

    Weights with the same name are one tensor, in this order: a fused projection.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None

    @property
    def num_norms(self) -> int:
        """Of a layer, those of queries and keys apart."""
        norms = (self.attention_norm, self.attention_output_norm)
        return sum(name is not None for name in (*norms, self.mlp_norm, self.mlp_output_norm))


LLAMA_NAMES = WeightNames()


@dataclass(frozen=True, kw_only=True)
class Family:
    """``options``: fields of ``DecoderConfig``, from a model's config, that differ from Llama's.

    ``activation``: the config field with the name of the activation; ``eps``: that with the norms'
    eps. ``interleaved``: RoPE pairs neighbours (2i, 2i + 1) instead of halves. ``partial_rotary``:
    it uses partial_rotary_factor. ``rotary_by_layer_type``: rope_parameters has an entry for each
    type of layer. ``rotated``: which layers have RoPE. ``experts``: it has a mixture of experts.
    ``refuses``: why a model of the family cannot run, None if it can. ``fields``: further fields
    that a config.json must state to be read without transformers; None: transformers reads it.
    ``foreign``: fields by which transformers knows that the model is of another family after all.
    """

    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    names: WeightNames = LLAMA_NAMES
    activation: str = "hidden_act"
    interleaved: bool = False
    partial_rotary: bool = False
    eps: str = "rms_norm_eps"
    rotary_by_layer_type: bool = False
    rotated: Callable[[Any], Sequence[bool]] = lambda config: (True,) * config.num_hidden_layers
    experts: bool = False
    refuses: Callable[[Any], str | None] = lambda config: None
    fields: Mapping[str, Types] | None = field(default=None, hash=False)
    foreign: frozenset[str] = frozenset()


# --- options that several families share --------------------------------------------------------


def attention_bias(config: Any) -> dict[str, Any]:
    """On all projections of attention, if the config says so."""
    return {"qkv_bias": bool(config.attention_bias), "output_bias": bool(config.attention_bias)}


def window_everywhere(config: Any) -> dict[str, Any]:
    """The same window in every layer."""
    return {"windows": (config.sliding_window,) * config.num_hidden_layers}


def window_by_layer(config: Any) -> dict[str, Any]:
    """A window in the layers whose type says so. transformers derives the types."""
    window = config.sliding_window
    if window is None:
        return {}
    kinds = config.layer_types
    return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


def bidirectional_unsupported_reason(config: Any) -> str | None:
    """Gemma's option for embedding models."""
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional (use_bidirectional_attention)"
    return None


def rotated_where_windowed(config: Any) -> list[bool]:
    """RoPE in the layers that have a window, of models in which some have one."""
    if config.sliding_window is None:
        return [True] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in config.layer_types]


def use_bias(config: Any) -> dict[str, Any]:
    """On all projections, if the config says so."""
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(config.use_bias))
