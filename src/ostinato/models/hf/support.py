"""Decides from a config which of transformers' models can run.

These checks need no weights. The others run a few tokens when the model is loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ostinato import compat
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.models.native.config.rotary import LONGEST_SEQUENCE
from ostinato.quoting import shown

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_STATEFUL_LAYERS = {"linear_attention", "mamba", "conv", "recurrent"}
# Types whose recurrent layers ``mixers.py`` runs, all of them.
_RECURRENT_TYPES = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
_CONVOLUTIONAL_TYPES = {"lfm2", "lfm2_moe"}  # of these, without a scan
_UNLIMITED_TYPES = {"mamba2"}  # without attention, no sequence is too long
_FIXED_ROPE = "default"


def check_config(
    config: PretrainedConfig,
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING,
    kind: str = "causal language model",
    *,
    packed: bool = False,
) -> None:
    """Raise if a model cannot run, and name it.

    ``mapping``: transformers' classes by config; ``kind``: what they are. ``packed``: it reads
    whole sequences, and keeps nothing of them.
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{config.model_type} is an encoder-decoder model; only decoder-only language models "
            "and encoders can be run"
        )
    if type(config) not in mapping:
        raise ConfigError(
            f"transformers has no {kind} of type {config.model_type!r} (code that comes with a "
            "checkpoint is not run)"
        )
    model_class: Any = mapping[type(config)]
    if isinstance(model_class, tuple):
        raise ConfigError(
            f"transformers has several {kind}s of type {config.model_type!r} "
            f"({', '.join(each.__name__ for each in model_class)}); it cannot be run"
        )
    name = model_class.__name__
    if is_recurrent(config, mapping):
        layers = f"{name} has state-space, convolutional or recurrent layers"
        if packed:
            raise ConfigError(f"{layers}; models with such layers cannot embed or classify")
        if config.model_type not in _RECURRENT_TYPES:
            raise ConfigError(
                f"{layers} of a kind that is not supported; it cannot be run. Types of models with "
                f"such layers that can: {', '.join(sorted(_RECURRENT_TYPES))}"
            )
    if not compat.can_replace_attention(model_class):
        raise without_interface(name)
    if not hasattr(config.get_text_config(), "num_hidden_layers"):
        raise ConfigError(
            f"the config of {name} has no num_hidden_layers; a model whose layers are not one "
            "stack cannot be run"
        )


def without_interface(name: str) -> ConfigError:
    """The error for a class of transformers whose attention is out of reach."""
    return ConfigError(
        f"{name} does not use transformers' AttentionInterface, through which its attention is "
        "replaced; it cannot be run"
    )


def is_recurrent(config: PretrainedConfig, mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING) -> bool:
    """Whether some layers of a model keep a state of the sequence that is not keys and values."""
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    stateful = getattr(mapping[type(config)], "_is_stateful", False)
    return stateful or not layer_types.isdisjoint(_STATEFUL_LAYERS)


def recurrent_support(config: PretrainedConfig) -> AttentionCGSupport | None:
    """Which batches the recurrent layers of a model can be captured for; None: it has none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not is_recurrent(config):
        return None
    if config.model_type in _CONVOLUTIONAL_TYPES:
        return AttentionCGSupport.ALWAYS
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def longest_sequence(config: PretrainedConfig, max_model_len: int | None) -> int:
    """The longest sequence that a model of ``config`` supports.

    RoPE frequencies that change with the length of a sequence would have to be computed on the host
    for each batch, and would not match the keys already in the cache. They are frozen to those for
    short sequences, so the limit is the length at which they would change. ``max_model_len`` is the
    user's setting, if any.
    """
    text_config = config.get_text_config()
    lengths = (getattr(text_config, name, None) for name in _LENGTH_NAMES)
    length = next((length for length in lengths if length), None)
    if length is None and config.model_type in _UNLIMITED_TYPES:
        if max_model_len is None:
            raise ConfigError(
                f"models of type {config.model_type} have no limit on the length of a sequence; "
                "set max_model_len to the longest that you need"
            )
        length = max_model_len
    if length is None:
        raise ConfigError(
            f"the config of {config.model_type} has none of {', '.join(_LENGTH_NAMES)}; set one to "
            "the longest sequence that the model supports"
        )
    for rope in _rope_parameters(text_config):
        limit = _frozen_limit(rope, length)
        if limit is None:
            continue
        if max_model_len is not None and max_model_len > limit:
            raise ConfigError(
                f"{config.model_type} has {rope['rope_type']!r} rotary embeddings, whose "
                f"frequencies change beyond {limit} tokens and are not changed here; set "
                f"max_model_len to at most {limit}, got {max_model_len}"
            )
        length = min(length, limit)
    if type(length) is not int or not 1 <= length <= LONGEST_SEQUENCE:
        raise ConfigError(
            f"the longest sequence of {config.model_type}, by its config, is {shown(length)}; it "
            f"must be an integer from 1 to {LONGEST_SEQUENCE:,}"
        )
    return length


def freeze_rope(model: nn.Module) -> None:
    """Keep RoPE frequencies as they were built, for short sequences."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by kind of layer
            module.rope_type = {  # type: ignore[assignment]
                layer: _FIXED_ROPE if _changes(rope_type) else rope_type
                for layer, rope_type in kind.items()
            }
        elif _changes(kind):
            module.rope_type = _FIXED_ROPE  # type: ignore[assignment]


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One dictionary, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        return [given]
    return [rope for rope in given.values() if isinstance(rope, dict) and "rope_type" in rope]


def _frozen_limit(rope: dict[str, Any], length: int) -> int | None:
    """The length up to which the frequencies stay those of short sequences; None: no limit."""
    if not _changes(rope["rope_type"]):
        return None
    return int(
        rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else length
    )


def _changes(rope_type: object) -> bool:
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)
