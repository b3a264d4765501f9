"""Names the memory at an address, for reports."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def name_among(named: Iterable[tuple[str, torch.Tensor]], address: int) -> str | None:
    """The name of the tensor whose memory contains ``address``; None if there is none."""
    for name, tensor in named:
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return name
    return None


def name_in_module(module: nn.Module, address: int) -> str | None:
    """The name of the parameter or buffer of ``module`` at ``address``; None if there is none."""
    return name_among((*module.named_parameters(), *module.named_buffers()), address)
