"""The destination of a checkpoint's tensor in a model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

# The role of a tensor, or of a range of its rows, in a decoder.
Role = Literal[
    "query", "key", "value", "output", "gate", "up", "down", "vocabulary", "sinks", "latent"
]


class WeightSlot(NamedTuple):
    """The destination of a checkpoint's tensor: ``shape`` in the file, broadcast into ``target``.

    If both have as many elements, it is reshaped instead. ``target`` is a view of a parameter,
    which may hold several of the checkpoint's tensors. With ``parts``, only these ranges of
    dimension ``dim`` are read, in order; if there are none, the target becomes zero. ``offset`` is
    added to the values. ``roles`` are the roles of the tensor's rows, or of its columns, in order;
    without any, the tensor is the same on every rank.
    """

    name: str
    target: torch.Tensor
    shape: torch.Size
    parts: tuple[range, ...] | None = None
    dim: int = 0
    offset: float = 0.0
    roles: tuple[Role, ...] = ()
