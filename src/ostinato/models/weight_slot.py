"""Where a tensor of a checkpoint goes in a model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

# What a tensor, or a stretch of its rows, is to a decoder.
Role = Literal["query", "key", "value", "output", "gate", "up", "down", "vocabulary"]


class WeightSlot(NamedTuple):
    """Where a checkpoint's tensor goes: ``shape`` in the file, broadcast into ``target``.

    ``target`` is a view of a parameter, which may hold several of the checkpoint's tensors. Of a
    tensor with ``parts`` only these stretches of dimension ``dim`` are read, one after another; if
    there are none, the target becomes zero. ``offset`` is added to what is read. ``roles`` are
    those of the tensor's rows, or of its columns, in order; none: it is the same on every rank.
    """

    name: str
    target: torch.Tensor
    shape: torch.Size
    parts: tuple[range, ...] | None = None
    dim: int = 0
    offset: float = 0.0
    roles: tuple[Role, ...] = ()
