"""What the native decoder needs to know of a model, read once from its transformers config.

A frozen record of plain values: dimensions, flags, one window per layer and the rotary
frequencies. Which models the decoder can run is decided here too, so that a model it would get
wrong goes to the generic path with a reason, not to wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError
from ostinato.models.native.rotary import LONGEST_SEQUENCE, Rotary, rotary_obstacle
from ostinato.quoting import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.models.native.stated_config import StatedConfig

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Beyond those of any model, and small enough that nothing made of them exhausts the memory.
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
    """One dense decoder: pre-norm attention and SwiGLU blocks with rotary positions.

    ``windows`` has one entry per layer: the keys that a query sees, itself included, or None for
    all. ``max_position`` is the longest sequence for which ``rotary`` is right.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    windows: tuple[int | None, ...]
    rotary: Rotary
    max_position: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"{field.name} of a decoder must be at least 1, not {value}")
        if type(self.rms_norm_eps) not in (int, float) or not 0 <= self.rms_norm_eps < 1:
            raise ConfigError(
                f"rms_norm_eps must be a number from 0, below 1, not {shown(self.rms_norm_eps)}"
            )
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ConfigError(f"sliding_window must be an integer from 1, not {shown(window)}")
        if self.max_position > LONGEST_SEQUENCE:
            raise ConfigError(
                f"a longest sequence of {self.max_position:,} tokens (max_position_embeddings, or "
                f"what rope_parameters make of it) is more than {LONGEST_SEQUENCE:,}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads "
                "evenly; num_attention_heads must be a multiple of num_key_value_heads"
            )
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.head_dim % 2:
            raise ConfigError(f"rotary positions turn pairs: head_dim {self.head_dim} is odd")

    @classmethod
    def from_hf(cls, config: PretrainedConfig | StatedConfig) -> DecoderConfig:
        """The decoder's view of a transformers config. Raises where ``obstacle`` gives a reason."""
        reason = obstacle(config)
        if reason is not None:
            raise ConfigError(f"the native decoder cannot run this model: {reason}")
        _check_sizes(config)
        family = config.model_type
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            rms_norm_eps=config.rms_norm_eps,
            # The biases that each family's modules have; Mistral's ignore attention_bias.
            qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
            output_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=family == "llama" and bool(config.mlp_bias),
            qk_norm=family == "qwen3",
            tied_head=bool(config.tie_word_embeddings),
            windows=_windows(config),
            rotary=Rotary.from_hf(config, _head_dim(config)),
            max_position=_max_position(config),
        )


def _check_sizes(config: PretrainedConfig | StatedConfig) -> None:
    """Refuse sizes by the names of the config, before anything is made of them."""
    for name, largest in _LARGEST.items():
        value = getattr(config, name, None)
        if name == "head_dim" and value is None:
            continue
        if type(value) is not int or not 1 <= value <= largest:
            raise ConfigError(
                f"{name} must be an integer from 1 to {largest:,}, not {shown(value)}"
            )


def obstacle(config: PretrainedConfig | StatedConfig) -> str | None:
    """Why the native decoder cannot run a model with this config; None where it can."""
    if config.model_type not in _FAMILIES:
        return f"its model_type is {shown(config.model_type)}, not one of {', '.join(_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its hidden_act is {shown(config.hidden_act)}, not 'silu'"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized (it has a quantization_config)"
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        return f"it has layers of the types {shown(sorted(unknown))}"
    return rotary_obstacle(config)


def supports(config: PretrainedConfig | StatedConfig) -> bool:
    """Whether the native decoder can run a model with this config."""
    return obstacle(config) is None


def _head_dim(config: PretrainedConfig | StatedConfig) -> int:
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _windows(config: PretrainedConfig | StatedConfig) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type == "llama" or window is None:
        return (None,) * num_layers
    if config.model_type == "mistral":
        return (window,) * num_layers
    # transformers works layer_types out from use_sliding_window and max_window_layers.
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _max_position(config: PretrainedConfig | StatedConfig) -> int:
    stated: int = config.max_position_embeddings
    rope: dict[str, Any] = config.rope_parameters
    if rope["rope_type"] == "yarn" and rope.get("factor") is not None:
        # Such configs often state the length of pretraining, which the factor then extends.
        return max(stated, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if rope["rope_type"] == "longrope":
        # Beyond this length all positions would turn at other frequencies, cached keys included.
        return min(stated, int(rope["original_max_position_embeddings"]))
    return stated
