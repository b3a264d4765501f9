"""Torch's switches that decide which kernels a call runs: part of what a graph is captured with.

A graph holds the kernels that were chosen under the switches of its capture. The same call under
others would run other kernels eagerly, so it needs a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_C: Any = torch._C


class _Switch(NamedTuple):
    name: str
    read: Callable[[], Any]


def _switches(device_type: str) -> list[_Switch]:
    """What is read on every call; the cheapest way to each, since there are a dozen of them."""
    switches = [
        _Switch("autocast", lambda: _autocast_dtype(device_type)),
        _Switch("default dtype", torch.get_default_dtype),
        _Switch("inference mode", torch.is_inference_mode_enabled),
        _Switch("deterministic algorithms", _C._get_deterministic_algorithms),
        _Switch("float32 matmul precision", _C._get_float32_matmul_precision),
        # `with torch.device(...)` and other modes that see every function of torch.
        _Switch("number of torch function modes", _C._len_torch_function_stack),
    ]
    if device_type == "cuda":
        switches += [
            _Switch("allow_tf32 of matmul", _C._get_cublas_allow_tf32),
            _Switch("allow_tf32 of cuDNN", _C._get_cudnn_allow_tf32),
            _Switch("reduced-precision sums in fp16", _fp16_reduction),
            _Switch("reduced-precision sums in bf16", _bf16_reduction),
            _Switch("cuDNN", _C._get_cudnn_enabled),
            _Switch("cuDNN benchmark", _C._get_cudnn_benchmark),
            _Switch("cuDNN deterministic", _C._get_cudnn_deterministic),
            _Switch("flash attention", _C._get_flash_sdp_enabled),
            _Switch("memory-efficient attention", _C._get_mem_efficient_sdp_enabled),
            _Switch("math attention", _C._get_math_sdp_enabled),
            _Switch("cuDNN attention", _C._get_cudnn_sdp_enabled),
        ]
    return switches


_fp16_reduction = _C._get_cublas_allow_fp16_reduced_precision_reduction
_bf16_reduction = _C._get_cublas_allow_bf16_reduced_precision_reduction


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return _C.get_autocast_dtype(device_type) if _C.is_autocast_enabled(device_type) else None


class AmbientState:
    """Reads the switches for one type of device. What it reads is hashable."""

    def __init__(self, device_type: str) -> None:
        switches = _switches(device_type)
        self._names = [switch.name for switch in switches]
        self._reads = [switch.read for switch in switches]

    def read(self) -> tuple[Any, ...]:
        return tuple([read() for read in self._reads])

    def difference(self, was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        """The first switch that differs, in words; empty if none does."""
        for name, before, after in zip(self._names, was, now, strict=True):
            if before != after:
                return f"{name} was {before} and is {after}"
        return ""
