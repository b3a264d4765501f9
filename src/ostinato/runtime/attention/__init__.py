"""Attention over the paged KV cache: one protocol, several backends."""

from __future__ import annotations

import importlib.util

import torch

from ostinato.errors import ConfigError
from ostinato.runtime.attention.base import AttentionBackend


def create_attention(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; "auto" is the fastest that runs on the device."""
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        name = "triton" if device.type == "cuda" and has_triton else "torch"
    if name == "torch":
        from ostinato.runtime.attention.torch_paged import TorchPagedAttention

        return TorchPagedAttention()
    if device.type != "cuda" or not has_triton:
        raise ConfigError(
            f"attention 'triton' needs a CUDA device and the triton package; the device is "
            f"{device}{'' if has_triton else ', and triton is not installed'}; use 'torch'"
        )
    from ostinato.runtime.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention()
