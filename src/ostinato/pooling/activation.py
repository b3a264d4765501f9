"""From a classification head's logits to probabilities, as the checkpoint's config asks."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.errors import ConfigError
from ostinato.quoting import shown


def label_names(config: Any) -> list[str]:
    names: dict[int, str] = config.id2label
    return [str(names[index]) for index in range(config.num_labels)]


def probabilities(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Of each label, from ``logits`` [B, num_labels].

    A label alone, or one of several that may be true together, has its own (sigmoid); others share
    one distribution (softmax). A regression's results, and those of cross-encoders that ask for it,
    are left as they are.
    """
    activation = _stated(config)
    if activation == "Identity" or (activation is None and config.problem_type == "regression"):
        return logits
    several = config.problem_type == "multi_label_classification"
    if activation == "Sigmoid" or config.num_labels == 1 or several:
        return logits.sigmoid()
    return logits.softmax(-1)


def _stated(config: Any) -> str | None:
    """The activation that sentence-transformers wrote into the config of a cross-encoder."""
    stated = getattr(config, "sbert_ce_default_activation_function", None)
    newer = getattr(config, "sentence_transformers", None)
    if isinstance(newer, dict):
        stated = newer.get("activation_fn", stated)
    if stated is None:
        return None
    name = str(stated).rpartition(".")[2]
    if name not in ("Identity", "Sigmoid"):
        raise ConfigError(
            f"the config asks for the activation {shown(stated)}; Identity and Sigmoid are "
            "supported"
        )
    return name
