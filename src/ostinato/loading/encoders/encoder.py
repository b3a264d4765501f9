"""Loads a model that embeds or classifies: ``load_encoder``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from ostinato.errors import ConfigError
from ostinato.loading.description import (
    ModelDescription,
    describe,
    describe_shape,
    errors_named,
)
from ostinato.loading.encoders.sentence import SentenceSettings, read_settings
from ostinato.loading.encoders.task import ENCODER_SHAPES
from ostinato.loading.free_memory import check_fit, free_memory
from ostinato.loading.load import as_hf
from ostinato.loading.locate import find_model
from ostinato.loading.progress import progress_bars
from ostinato.loading.tokenizer import read_tokenizer
from ostinato.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.models.hf.encoder import HFEncoder

_Task: TypeAlias = Literal["embed", "classify"]


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """An encoder, the directory it came from and its tokenizer; None if there is none."""

    model: HFEncoder
    path: Path | None
    tokenizer: Any | None
    settings: SentenceSettings


def load_encoder(
    name: str | None,
    *,
    task: _Task,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None,
    random_weights: bool = False,
    seed: int = 0,
    show_progress: bool = True,
) -> LoadedEncoder:
    """Load the model called ``name``, through transformers' modules; None: the embedded default.

    With ``random_weights`` the weights are drawn from ``seed`` and only the config is read.
    """
    from ostinato.models.hf.encoder import HFEncoder

    options: dict[str, Any] = {
        "task": task,
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
    }
    if random_weights:
        path, config = _shape(name or "bert-base", task)
        with errors_named((path or Path()) / "config.json"):
            model = HFEncoder.from_config(
                config, **options, seed=seed, most_bytes=free_memory(device)
            )
        settings = SentenceSettings() if path is None else read_settings(path)
        return LoadedEncoder(model=model, path=path, tokenizer=None, settings=settings)
    path = find_model(name, show_progress=show_progress)
    described = describe(path)
    if described.swiftkv is not None:
        raise ConfigError(f"{path} is a SwiftKV model, which generates; it cannot {task}")
    settings = read_settings(path)
    checkpoint = Checkpoint(path)
    config = _config_for(task, described)
    if described.whole is not None and config is not described.whole:
        checkpoint = checkpoint.language_model()
    check_fit(str(path), checkpoint.num_elements() * dtype.itemsize, device, dtype)
    with errors_named(path / "config.json"), progress_bars(show_progress):
        model = HFEncoder.from_pretrained(path, config=config, **options, checkpoint=checkpoint)
    return LoadedEncoder(model=model, path=path, tokenizer=read_tokenizer(path), settings=settings)


def _config_for(task: _Task, described: ModelDescription) -> PretrainedConfig:
    """The language model's, unless the labels are in the config of the whole."""
    if task == "classify" and described.whole is not None:
        return described.whole
    return as_hf(described.config)


def _shape(name: str, task: _Task) -> tuple[Path | None, PretrainedConfig]:
    """The directory, if any, and the config of the shape called ``name``."""
    if name in ENCODER_SHAPES:
        from transformers import AutoConfig

        return None, AutoConfig.for_model(**ENCODER_SHAPES[name])
    path, described = describe_shape(name)
    return path, _config_for(task, described)
