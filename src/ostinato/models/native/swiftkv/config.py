"""The config of a SwiftKV model: a decoder, and the number of its early layers.

A frozen record of plain values, read from a checkpoint's config.json or built for a plain decoder,
whose weights then replace the trained ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig, first_layers
from ostinato.models.native.config.raw_config import RawConfig, raw_config
from ostinato.quoting import said, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SUFFIX = "_swiftkv"
_OWN_FIELDS = ("num_key_value_layers", "key_value_group_size", "auto_map", "architectures")


def is_swiftkv(fields: Any) -> bool:
    """Whether the fields of a config.json name a SwiftKV model."""
    kind = fields.get("model_type") if isinstance(fields, Mapping) else None
    return isinstance(kind, str) and kind.endswith(_SUFFIX)


def plain_config(fields: Mapping[str, Any]) -> PretrainedConfig | RawConfig:
    """The config of the plain decoder behind a SwiftKV model, from its config.json."""
    kind: str = fields["model_type"]
    plain = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    plain["model_type"] = kind.removesuffix(_SUFFIX)
    stated = raw_config(plain)
    if stated is not None:
        return stated
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.for_model(**plain)
    except ValueError as error:  # a family that transformers does not know
        raise ConfigError(
            f"model_type {shown(kind)}: SwiftKV of an unknown family ({said(error)})"
        ) from error
    return config


@dataclass(frozen=True, kw_only=True)
class SwiftKVConfig:
    """A decoder whose late layers all compute keys and values from the same hidden state.

    Late layers are those from ``num_key_value_layers`` on; the hidden state is their first input.

    ``trained``: the checkpoint is a SwiftKV model, with separate projections for these layers.
    Otherwise it is a plain decoder, and its projections are used, with the norm of the first late
    layer, which is where training starts. With at most one late layer that equals the plain
    decoder; with more it is an untrained approximation.
    """

    decoder: DecoderConfig
    num_key_value_layers: int
    trained: bool = False

    def __post_init__(self) -> None:
        num_early, num_layers = self.num_key_value_layers, self.decoder.num_layers
        if type(num_early) is not int or not 1 <= num_early <= num_layers:
            raise ConfigError(
                f"num_key_value_layers must be an int from 1 to the model's {num_layers} layers, "
                f"got {shown(num_early)}"
            )
        if self.decoder.names.attention_norm is None or self.decoder.qk_norm == "full":
            raise ConfigError(
                "SwiftKV needs a model with a norm before attention, and no norm over all heads at "
                "once; leave swiftkv_layers out"
            )

        if self.decoder.experts is not None:
            raise ConfigError(
                "SwiftKV needs a dense model, and this one has experts; leave swiftkv_layers out"
            )
        if self.decoder.latent is not None:
            raise ConfigError(
                "SwiftKV needs keys and values of every head, and this model has latent attention; "
                "leave swiftkv_layers out"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SwiftKVConfig:
        """Read the config.json of a SwiftKV checkpoint, such as ``llama_swiftkv``."""
        if not is_swiftkv(fields):
            raise ConfigError(
                f"model_type of a SwiftKV model ends in {_SUFFIX!r}; this is "
                f"{shown(fields.get('model_type'))}"
            )
        group = fields.get("key_value_group_size") or 1
        if group != 1:
            raise ConfigError(
                f"key_value_group_size is {shown(group)}: keys and values shared among layers "
                "(AcrossKV) are not supported; use a model in which it is 1"
            )
        decoder = DecoderConfig.from_hf(plain_config(fields))
        num_early = fields.get("num_key_value_layers") or decoder.num_layers
        return cls(decoder=decoder, num_key_value_layers=num_early, trained=True)

    @property
    def early(self) -> DecoderConfig:
        """The decoder of the early layers alone."""
        return first_layers(self.decoder, self.num_key_value_layers)

    @property
    def late_layers(self) -> range:
        return range(self.num_key_value_layers, self.decoder.num_layers)
