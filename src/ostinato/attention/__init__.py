"""Attention over the paged KV cache: one protocol, several backends."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ostinato.attention.base import AttentionBackend
from ostinato.errors import ConfigError
from ostinato.ops.numba import has_numba


def create_attention(name: str | AttentionBackend, device: torch.device) -> AttentionBackend:
    """The backend of that name, or itself; "auto" is the fastest that runs on the device."""
    if not isinstance(name, str):
        return name
    on_cuda, on_cpu = device.type == "cuda", device.type == "cpu"
    runs = {
        "torch": True,
        "triton": on_cuda and find_spec("triton") is not None,
        "numba": on_cpu and has_numba(),
    }
    if name == "auto":
        name = next(each for each in ("triton", "numba", "torch") if runs[each])
    if not runs[name]:
        needed = "a CUDA device" if name == "triton" else "the CPU"
        raise ConfigError(
            f"attention {name!r} needs {needed} and the package {name}; the device is {device}, "
            f"and {name} is {'' if find_spec(name) else 'not '}installed; use 'torch' or 'auto'"
        )
    if name == "triton":
        from ostinato.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention()
    if name == "numba":
        from ostinato.attention.numba_paged import NumbaPagedAttention

        return NumbaPagedAttention()
    from ostinato.attention.reference.torch_paged import TorchPagedAttention

    return TorchPagedAttention()
