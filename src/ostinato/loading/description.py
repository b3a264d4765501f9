"""Describes a model before it is loaded: its config, and which of our classes can run it.

Read from a checkpoint's config.json or from a named shape. A config.json with a SwiftKV model type
describes a SwiftKV model; ``as_swiftkv`` turns any other model of the native decoder into one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ostinato.errors import ConfigError, ModelLoadError, OstinatoError
from ostinato.models.json_file import check_numbers, read_object
from ostinato.models.native.config.decoder_config import DecoderConfig, unsupported_reason
from ostinato.models.native.config.raw_config import RawConfig, raw_config
from ostinato.models.native.shapes import SHAPES, shape_config
from ostinato.models.native.swiftkv.config import SwiftKVConfig, is_swiftkv, plain_config
from ostinato.quoting import said

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ModelConfig = PretrainedConfig | RawConfig

# They take images or sound, but not here: the language model alone is run. transformers' class for
# the whole computes the second table of embeddings (Gemma 3n, 4) outside the language model.
_TEXT_ONLY = ("gemma3", "gemma3n", "gemma4", "gemma4_unified")

NativeConfig: TypeAlias = DecoderConfig | SwiftKVConfig


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """``config`` is the plain model's; for a SwiftKV model, that of its plain decoder.

    ``generic_reason`` says why the native decoder cannot run it; None if it can. ``whole``: the
    config of the checkpoint's image-and-text model, if this is the language model of one.
    """

    config: ModelConfig
    generic_reason: str | None
    swiftkv: SwiftKVConfig | None = None
    whole: PretrainedConfig | None = None

    @property
    def native_config(self) -> NativeConfig:
        """The config to build. Raises if there is a ``generic_reason``."""
        return self.swiftkv or DecoderConfig.from_hf(self.config)

    def as_swiftkv(self, num_layers: int) -> ModelDescription:
        """The SwiftKV form of the model, with ``num_layers`` early layers."""
        asked = f"swiftkv_layers={num_layers}"
        if self.generic_reason is not None:
            raise ConfigError(
                f"{asked} is for models of the native decoder; this one does not run on it: "
                f"{self.generic_reason}"
            )
        if self.swiftkv is not None:
            own = self.swiftkv.num_key_value_layers
            if own != num_layers:
                raise ConfigError(
                    f"{asked}, but this checkpoint is a SwiftKV model, trained with {own}; leave "
                    "swiftkv_layers out"
                )
            return self
        decoder = DecoderConfig.from_hf(self.config)
        if num_layers > decoder.num_layers:
            raise ConfigError(
                f"{asked} is more than the model's {decoder.num_layers} layers; choose 1 to "
                f"{decoder.num_layers}"
            )
        swiftkv = SwiftKVConfig(decoder=decoder, num_key_value_layers=num_layers)
        return replace(self, swiftkv=swiftkv)

    def untrained(self) -> ModelDescription:
        """The same for random weights, which are always those of a plain decoder."""
        if self.swiftkv is None:
            return self
        return replace(self, swiftkv=replace(self.swiftkv, trained=False))


def describe(path: Path) -> ModelDescription:
    """Describe the model in the directory ``path``, by its config.json."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelLoadError(f"{path} has no config.json; a model's directory needs one")
    if (path / "adapter_config.json").is_file():
        raise ModelLoadError(
            f"{path} has an adapter_config.json: it is an adapter (LoRA) for another model; "
            "name that model, with enable_lora=True, and load the adapter with load_adapter()"
        )
    fields = read_object(file)
    check_numbers(file, fields)
    with errors_named(file):
        description = _describe(path, fields)
        if description.generic_reason is None:
            _ = description.native_config  # raises for invalid values
    return description


def _describe(path: Path, fields: dict[str, Any]) -> ModelDescription:
    if is_swiftkv(fields):
        swiftkv = SwiftKVConfig.from_fields(fields)
        return ModelDescription(config=plain_config(fields), generic_reason=None, swiftkv=swiftkv)
    stated = raw_config(fields)
    if stated is not None and unsupported_reason(stated) is None:
        return ModelDescription(config=stated, generic_reason=None)
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = _language_model(config)
    if text is not None:
        return ModelDescription(config=text, generic_reason=unsupported_reason(text), whole=config)
    return ModelDescription(config=config, generic_reason=unsupported_reason(config))


def _language_model(config: PretrainedConfig) -> PretrainedConfig | None:
    """The config of the language model of a model that takes images, but not here."""
    if config.model_type not in _TEXT_ONLY or getattr(config, "quantization_config", None):
        return None
    text: PretrainedConfig = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "eos_token_id", None) is not None:
        text.eos_token_id = config.eos_token_id
    return text


def runs_alone(config: PretrainedConfig) -> bool:
    """Whether ``config`` is that of a language model whose checkpoints may have encoders too."""
    return config.model_type.removesuffix("_text") in _TEXT_ONLY


@contextmanager
def errors_named(file: Path) -> Iterator[None]:
    """Name the config file in every error about it, from transformers or from here."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (OstinatoError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot read {file}: {said(error)} (models that need their own code, "
            "with trust_remote_code, are not run)"
        ) from error


def describe_shape(name: str) -> tuple[Path | None, ModelDescription]:
    """Describe the shape called ``name``, or the checkpoint in the directory ``name``."""
    path = Path(name).expanduser()
    if name not in SHAPES and (path / "config.json").is_file():
        return path, describe(path).untrained()
    if name not in SHAPES and path.is_dir():
        raise ModelLoadError(f"{path} has no config.json to read the model's shape from")
    config = shape_config(name)
    return None, ModelDescription(config=config, generic_reason=unsupported_reason(config))
