"""Creates a tensor with another tensor's metadata over given memory."""

from __future__ import annotations

from typing import Any

import torch

from ostinato import compat
from ostinato.compat import neg_view


def alias_of(tensor: torch.Tensor, storage: Any, offset: int) -> torch.Tensor:
    """``tensor``'s shape, strides and type over ``storage``, ``offset`` elements into it.

    The alias also copies lazy conjugation and negation, which belong to a tensor, not its memory.
    """
    if torch.is_inference_mode_enabled():  # the alias must be usable outside inference mode too
        with compat.inference_mode(False):
            return alias_of(tensor, storage, offset)
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, offset, tensor.shape, tensor.stride())
    if tensor.is_conj():
        alias = alias.conj()
    return neg_view(alias) if tensor.is_neg() else alias
