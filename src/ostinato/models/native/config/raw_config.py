"""Reads configs that state every field of the native decoder, without transformers.

transformers' config classes fill in missing fields, and importing one takes two seconds. A complete
file does not need that. Anything unusual, old or ambiguous goes to transformers instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.models.native.config.families import FAMILIES
from ostinato.models.native.config.family import Family

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
    "yarn": {
        "rope_type",
        "rope_theta",
        "factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
    },
}
_DOUBTFUL = ("quantization_config", "rope_scaling", "rope_theta", "auto_map")
_CONTEXT = "original_max_position_embeddings"


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
    if any(fields.get(name) is not None for name in _DOUBTFUL) or family.foreign & fields.keys():
        return None
    own = {family.activation: (str,), family.eps: (float,), **family.fields}
    for name, types in {**_COMMON, **own}.items():
        if name not in fields or type(fields[name]) not in types:
            return None
    rope, layer_types = fields["rope_parameters"], fields.get("layer_types") or []
    if _CONTEXT in rope and _CONTEXT in fields:  # which transformers prefers
        return None
    if family.rotary_by_layer_type:
        if {each for each in layer_types if isinstance(each, str)} != rope.keys():
            return None
        known = all(_is_known_rope(each, family) for each in rope.values())
    else:
        known = _is_known_rope(rope, family)
    return RawConfig(fields) if known else None


def _is_known_rope(rope: Any, family: Family) -> bool:
    """Whether these parameters of RoPE are all that their type has."""
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    own = {"partial_rotary_factor"} if family.partial_rotary else set()
    return isinstance(kind, str) and kind in _ROPE and rope.keys() == _ROPE[kind] | own
