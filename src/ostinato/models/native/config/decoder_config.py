"""The native decoder's view of a model, read once from its transformers config.

A frozen record of plain values: dimensions, options, one window per layer and the RoPE frequencies.
``families.py`` has the options of each family. This module decides which models the decoder can
run, so that an unsupported model goes to the generic path with a reason, instead of giving wrong
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from ostinato.errors import ConfigError
from ostinato.models.native.config.experts_config import ExpertsConfig
from ostinato.models.native.config.families import FAMILIES
from ostinato.models.native.config.family import LLAMA_NAMES, Family, WeightNames
from ostinato.models.native.config.latent_config import LatentConfig
from ostinato.models.native.config.rotary import (
    LONGEST_SEQUENCE,
    Rotary,
    rope_kinds,
    rotary_unsupported_reason,
)
from ostinato.models.native.config.size_check import check_size
from ostinato.ops.activation import Activation
from ostinato.quoting import said, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.models.native.config.raw_config import RawConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
_SCALES = (
    "attention_scale",
    "attention_soft_cap",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "logit_soft_cap",
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Larger than in any model, and small enough that nothing of this size exhausts the memory.
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": LONGEST_SEQUENCE,
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder: attention and an MLP, or several, in each layer; norms, RoPE.

    ``windows`` has one entry per layer: the number of keys that a query sees, itself included, or
    None for all. ``max_position`` is the longest sequence for which RoPE is right. Options default
    to Llama's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_head: bool
    windows: tuple[int | None, ...]
    rotary: Rotary
    max_position: int
    names: WeightNames = LLAMA_NAMES  # and with them, where a layer has norms
    experts: ExpertsConfig | None = None  # None: every layer has one MLP
    activation: Activation = "silu"  # of the gate
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False  # one more logit for every head in the softmax of attention, with no value
    qk_norm: Literal["head", "full"] | None = None  # over each head, or over all of them at once
    norm_offset: float = 0.0  # added to the weights of norms, which are kept in float32 then
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    other_rotaries: tuple[Rotary, ...] = ()  # of some layers; they differ in frequencies alone
    layer_rotaries: tuple[int, ...] = ()  # one per layer: 0 is ``rotary``, then the others
    gated: bool = True  # the MLP has a gate; activation is the gate's, or else that of all of it
    parallel: bool = False  # attention and MLP read the same norm
    layer_norm: bool = False  # LayerNorm in place of RMSNorm
    norm_bias: bool = False
    latent: LatentConfig | None = None  # keys and values are latent; head_dim is the part with RoPE
    unused_layers: tuple[int, ...] = ()  # of checkpoints: they predict further tokens (MTP)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"{field.name} of a decoder must be at least 1, not {value}")
        if type(self.rms_norm_eps) not in (int, float) or not 0 <= self.rms_norm_eps < 1:
            raise ConfigError(
                f"rms_norm_eps must be a number in [0, 1), got {shown(self.rms_norm_eps)}"
            )
        for name in _SCALES:
            scale = getattr(self, name)
            if scale is not None and not (type(scale) in (int, float) and 0 < scale < math.inf):
                raise ConfigError(f"{name} must be a positive number, not {shown(scale)}")
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ConfigError(f"sliding_window must be a positive integer, got {shown(window)}")
        if self.max_position > LONGEST_SEQUENCE:
            raise ConfigError(
                f"the longest sequence is {self.max_position:,} tokens (max_position_embeddings, "
                f"as extended by rope_parameters); the limit is {LONGEST_SEQUENCE:,}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads "
                "evenly; num_attention_heads must be a multiple of num_key_value_heads"
            )
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"the config has windows for {len(self.windows)} layers, but {self.num_layers} "
                "layers"
            )
        if self.experts is not None and (
            self.residual_scale != 1.0 or self.names.mlp_output_norm is not None
        ):
            raise ConfigError(
                "the native decoder cannot scale or norm the output of experts before it is added "
                "to the residual stream"
            )
        if self.layer_rotaries and len(self.layer_rotaries) != self.num_layers:
            raise ConfigError(
                f"the config has RoPE for {len(self.layer_rotaries)} layers, but {self.num_layers} "
                "layers"
            )
        if self.qk_norm is not None and self.layer_norm:
            raise ConfigError("queries and keys are normed by RMSNorm only, but layer_norm is True")
        if self.latent is not None and self.latent.qk_rope_head_dim != self.head_dim:
            raise ConfigError(
                f"head_dim is {self.head_dim}; with latent attention it must equal "
                f"qk_rope_head_dim, {self.latent.qk_rope_head_dim}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"RoPE rotates pairs, but head_dim {self.head_dim} is odd")

    def rotary_number(self, layer: int) -> int:
        """Which of ``rotaries`` a layer has."""
        return self.layer_rotaries[layer] if self.layer_rotaries else 0

    def check_split(self, num_ranks: int, *, experts_whole: bool = False) -> None:
        """Raise unless feed-forward layers can be split by their width over this many ranks.

        ``experts_whole``: experts are spread over ranks instead; the shared one is still split.
        """
        experts, widths = self.experts, list[tuple[str, int]]()
        if experts is None or not experts.layers.issuperset(range(self.num_layers)):
            widths.append(("feed-forward layers", self.intermediate_size))
        if experts is not None and not experts_whole:
            widths.append(("experts", experts.width))
        if experts is not None and experts.shared_width is not None:
            widths.append(("a shared expert", experts.shared_width))
        for what, width in widths:
            if width % num_ranks:
                raise ConfigError(
                    f"{what} of width {width} cannot be split evenly over {num_ranks} ranks; "
                    f"choose a number of ranks that divides {width}"
                )

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different RoPEs of the model."""
        return (self.rotary, *self.other_rotaries)

    @classmethod
    def from_hf(cls, config: PretrainedConfig | RawConfig) -> DecoderConfig:
        """The decoder's view of a transformers config; raises if it is unsupported."""
        reason = unsupported_reason(config)
        if reason is not None:
            raise ConfigError(f"the native decoder cannot run this model: {reason}")
        _check_sizes(config)
        family = FAMILIES[config.model_type]
        num_layers: int = config.num_hidden_layers
        try:
            options = {"windows": (None,) * num_layers, **family.options(config)}
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ConfigError(f"{config.model_type}: {said(error)}") from error
        layer_rotaries = _layer_rotaries(config, family)
        # The first decides the order of a head's rows, so layers without RoPE come last.
        rotary, *others = sorted(dict.fromkeys(layer_rotaries), key=lambda each: each.num_fixed)
        numbers = {each: number for number, each in enumerate((rotary, *others))}
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=num_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            rms_norm_eps=getattr(config, family.eps),
            tied_head=bool(config.tie_word_embeddings),
            rotary=rotary,
            other_rotaries=tuple(others),
            layer_rotaries=tuple(numbers[each] for each in layer_rotaries) if others else (),
            max_position=min(_max_position(config, rope) for rope in rope_kinds(config).values()),
            names=family.names,
            activation=_ACTIVATIONS[getattr(config, family.activation)],
            **options,
        )


def first_layers(config: DecoderConfig, num_layers: int) -> DecoderConfig:
    """The decoder that ends after ``num_layers`` layers."""
    return replace(
        config,
        num_layers=num_layers,
        windows=config.windows[:num_layers],
        layer_rotaries=config.layer_rotaries[:num_layers],
    )


def _check_sizes(config: PretrainedConfig | RawConfig) -> None:
    """Raise for invalid sizes, by their config names, before anything is built from them."""
    for name, largest in _LARGEST.items():
        value = getattr(config, name, None)
        if name == "head_dim" and value is None:
            continue
        check_size(name, value, largest)


def unsupported_reason(config: PretrainedConfig | RawConfig) -> str | None:
    """Why the native decoder cannot run a model with this config; None if it can."""
    family: Family | None = FAMILIES.get(config.model_type)
    if family is None:
        return f"its model_type is {shown(config.model_type)}, not one of {', '.join(FAMILIES)}"
    activation = getattr(config, family.activation)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        return f"its {family.activation} is {shown(activation)}, not one of {known}"
    if family.experts and activation != "silu":
        return f"its {family.activation} is {shown(activation)}; experts need 'silu'"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized (it has a quantization_config)"
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        return f"it has layers of the types {shown(sorted(unknown))}"
    return family.refuses(config) or rotary_unsupported_reason(
        config, partial=family.partial_rotary, by_layer_type=family.rotary_by_layer_type
    )


def supports(config: PretrainedConfig | RawConfig) -> bool:
    """Whether the native decoder can run a model with this config."""
    return unsupported_reason(config) is None


def _head_dim(config: PretrainedConfig | RawConfig) -> int:
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _layer_rotaries(config: PretrainedConfig | RawConfig, family: Family) -> tuple[Rotary, ...]:
    """RoPE of every layer."""
    head_dim, num_layers = _head_dim(config), config.num_hidden_layers
    kinds = {
        kind: Rotary.from_hf(config, head_dim, interleaved=family.interleaved, layer_type=kind)
        for kind in rope_kinds(config)
    }
    layer_kinds = config.layer_types if family.rotary_by_layer_type else (None,) * num_layers
    rotated = family.rotated(config)
    if len(layer_kinds) != num_layers or len(rotated) != num_layers:
        raise ConfigError(
            f"the config of {config.model_type} has types of {len(layer_kinds)} layers and RoPE "
            f"for {len(rotated)}, but {num_layers} layers"
        )
    none = Rotary.none(head_dim, interleaved=family.interleaved)
    pairs = zip(layer_kinds, rotated, strict=True)
    return tuple(kinds[kind] if has_rope else none for kind, has_rope in pairs)


def _max_position(config: PretrainedConfig | RawConfig, rope: dict[str, Any]) -> int:
    stated: int = config.max_position_embeddings
    if rope["rope_type"] == "yarn" and rope.get("factor") is not None:
        # Such configs often state the length of pretraining, which the factor then extends.
        return max(stated, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if rope["rope_type"] == "longrope":
        # Beyond this length all frequencies would change, those of cached keys included.
        return min(stated, int(rope["original_max_position_embeddings"]))
    return stated
