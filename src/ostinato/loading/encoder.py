"""Loads a model that embeds or classifies: ``load_encoder``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ostinato.errors import ConfigError
from ostinato.loading.description import describe, errors_named
from ostinato.loading.load import as_hf, check_fit, read_tokenizer
from ostinato.loading.sentence import SentenceSettings, read_settings
from ostinato.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ostinato.models.hf.encoder import HFEncoder


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """An encoder, the directory it came from, its tokenizer (None if there is none)."""

    model: HFEncoder
    path: Path
    tokenizer: Any | None
    settings: SentenceSettings


def load_encoder(
    path: Path,
    *,
    task: Literal["embed", "classify"],
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None,
) -> LoadedEncoder:
    """Load the checkpoint in the directory ``path``, through transformers' modules."""
    from ostinato.models.hf.encoder import HFEncoder

    described = describe(path)
    if described.swiftkv is not None:
        raise ConfigError(f"{path} is a SwiftKV model, which generates; it cannot {task}")
    settings = read_settings(path)
    checkpoint = Checkpoint(path)
    check_fit(str(path), checkpoint.num_elements() * dtype.itemsize, device, dtype)
    with errors_named(path / "config.json"):
        model = HFEncoder.from_pretrained(
            path,
            config=as_hf(described.config),
            task=task,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            checkpoint=checkpoint,
        )
    return LoadedEncoder(model=model, path=path, tokenizer=read_tokenizer(path), settings=settings)
