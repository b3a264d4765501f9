"""What decoders and encoders both do to transformers' modules, and how they compare results."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from ostinato.errors import ConfigError, OstinatoError
from ostinato.quoting import said


def own_copy(config: PretrainedConfig) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config.output_attentions = False  # with any attention but its own, transformers refuses it
    return config


def configs_in(model: nn.Module) -> list[Any]:
    """Every config that a module of ``model`` holds; some models give layers copies."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def make_quiet(config: Any) -> None:
    """Make the model return only its hidden states, and not read token ids on the host."""
    settings: dict[str, Any] = {
        "return_dict": True,
        "output_hidden_states": False,
        "output_router_logits": False,
    }
    # With a padding token, transformers searches every batch for it on the host, for a warning.
    settings["pad_token_id"] = None
    vars(config).update(settings)  # some configs reject None on assignment


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, all layers of ``model`` use the attention that is registered as ``name``."""
    configs = configs_in(model)
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


@contextmanager
def tables_noted(model: nn.Module, ids: torch.Tensor) -> Iterator[list[nn.Embedding]]:
    """Inside, list the tables of ``model`` in which it looks up ``ids``, and nothing else."""
    tables: list[nn.Embedding] = []

    def note(module: nn.Module, args: tuple[object, ...]) -> None:
        looked_up = args[0] if args else None  # some take a shape, and number the tokens themselves
        if isinstance(looked_up, torch.Tensor) and torch.equal(looked_up.flatten(), ids):
            tables.append(cast(nn.Embedding, module))

    hooks = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield tables
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def model_errors_explained(name: str) -> Iterator[None]:
    """Turn errors of the code of the model ``name`` into a ``ConfigError``."""
    try:
        yield
    except (OstinatoError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be run on a row of tokens with their positions: {said(error)}"
        ) from error


def close(values: torch.Tensor, others: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are equal up to the order of summation in kernels of ``dtype``."""
    tolerance = max(1e-4, 3 * torch.finfo(dtype).eps)
    difference = (values.float() - others.float()).abs().max()
    return bool(difference <= tolerance * others.float().abs().max())
