"""Reads configs that state every field of the native decoder, without transformers.

transformers' config classes fill in missing fields, and importing one takes two seconds. A complete
file does not need that. Anything unusual, old or ambiguous goes to transformers instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.models.native.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COMMON: dict[str, tuple[type, ...]] = {
    "vocab_size": (int,),
    "hidden_size": (int,),
    "intermediate_size": (int,),
    "num_hidden_layers": (int,),
    "num_attention_heads": (int,),
    "num_key_value_heads": (int,),
    "max_position_embeddings": (int,),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "tie_word_embeddings": (bool,),
    "rope_parameters": (dict,),
}
_ROPE = {
    "default": {"rope_type", "rope_theta"},
    "llama3": {
        "rope_type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_DOUBTFUL = ("quantization_config", "rope_scaling", "rope_theta", "auto_map")


class RawConfig:
    """The fields of a config.json as attributes, as ``DecoderConfig.from_hf`` reads them."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(f"this config does not state {name!r}") from None

    def standardize_rope_params(self) -> None:
        """transformers calls it before it reads rope_parameters; these are standard."""

    def to_hf(self) -> PretrainedConfig:
        """The same as a transformers config."""
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.for_model(**self._fields)
        return config


def raw_config(fields: Any) -> RawConfig | None:
    """``fields`` of a config as they are, or None if transformers must interpret them."""
    family = FAMILIES.get(fields.get("model_type", "")) if isinstance(fields, dict) else None
    if family is None or family.fields is None:
        return None
    if any(fields.get(name) is not None for name in _DOUBTFUL):
        return None
    for name, types in {**_COMMON, **family.fields}.items():
        if name not in fields or type(fields[name]) not in types:
            return None
    rope = fields["rope_parameters"]
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or _ROPE.get(kind) != rope.keys():
        return None
    return RawConfig(fields)
