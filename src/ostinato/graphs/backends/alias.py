"""A tensor over given memory that looks exactly like another one."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.compat import neg_view


def alias_of(tensor: torch.Tensor, storage: Any, offset: int) -> torch.Tensor:
    """``tensor``'s shape, strides and type over ``storage``, ``offset`` elements into it.

    Lazy conjugation and negation are properties of the tensor, not of its memory, and come along.
    """
    if torch.is_inference_mode_enabled():  # it must be usable in and out of inference mode
        with torch.inference_mode(False):
            return alias_of(tensor, storage, offset)
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, offset, tensor.shape, tensor.stride())
    if tensor.is_conj():
        alias = alias.conj()
    return neg_view(alias) if tensor.is_neg() else alias
