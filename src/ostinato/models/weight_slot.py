"""Where a tensor of a checkpoint goes in a model."""

from __future__ import annotations

from typing import NamedTuple

import torch


class WeightSlot(NamedTuple):
    """Where a checkpoint's tensor goes: ``shape`` in the file, broadcast into ``target``.

    ``target`` is a view of a parameter, which may hold several of the checkpoint's tensors. Of a
    tensor with ``parts`` only these stretches of dimension ``dim`` are read, one after another; if
    there are none, the target becomes zero.
    """

    name: str
    target: torch.Tensor
    shape: torch.Size
    parts: tuple[range, ...] | None = None
    dim: int = 0
