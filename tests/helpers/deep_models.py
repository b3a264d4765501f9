"""Tiny checkpoints with enough layers to offload some, and their tokens in transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from adapters import Merged
from tiny_models import TINY_NATIVE, VOCAB_SIZE, save_tiny

from ostinato import LLM

NUM_LAYERS = 6
NEW_TOKENS = 10
_made = TemporaryDirectory()  # removed at exit


@cache
def deep_model(name: str = "llama", seed: int = 0) -> Path:
    """The checkpoint of a family in ``TINY_NATIVE`` with ``NUM_LAYERS`` layers."""
    fields: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    made = TINY_NATIVE[name]()
    if getattr(made, "layer_types", None):
        fields["layer_types"] = list(made.layer_types) * (NUM_LAYERS // len(made.layer_types))
    config = type(made).from_dict(made.to_dict() | fields)
    return save_tiny(config, Path(_made.name) / f"{name}-{seed}", seed=seed)


@cache
def prompts() -> list[list[int]]:
    """Of different lengths, so that batches of a few of them run in every way there is."""
    source = torch.Generator().manual_seed(7)
    lengths = (1, 9, 23, 5)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=source).tolist() for n in lengths]


@cache
def deep_tokens(name: str = "llama", seed: int = 0) -> list[list[int]]:
    """transformers' greedy tokens for the prompts."""
    transformers.logging.set_verbosity_error()
    reference = Merged(deep_model(name, seed))
    return [reference.tokens(prompt, NEW_TOKENS) for prompt in prompts()]


def poison(llm: LLM) -> None:
    """Overwrite all slots with NaN, as if any other layer had been there."""
    offloader: Any = llm.engine.model.offloader
    for slot in offloader.slots:
        slot.fill_(0xFF)
