"""Kernels for the CPU in Python that Numba compiles, for what torch takes several operators for.

A model that decodes one request on a CPU spends its time reading weights; what comes next is the
way from one operator to the other. Like the Triton kernels, each stands beside a twin in plain
torch, which runs where Numba is not installed. Kernels take arrays of float32 in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def has_numba() -> bool:
    return find_spec("numba") is not None


def runs_compiled(*tensors: torch.Tensor) -> bool:
    """Whether kernels of this package can take these tensors."""
    return has_numba() and all(
        each.dtype is torch.float32 and each.device.type == "cpu" and each.is_contiguous()
        for each in tensors
    )


def prepare_kernel(name: str) -> Callable[..., Callable[[], object]]:
    """For ``define_for_cpu``: the kernel of that name, with an operator's arguments."""

    def prepare(*args: Any) -> Callable[[], object]:
        kernel = getattr(import_module("ostinato.runtime.cpu_kernels.kernels"), name)
        return partial(kernel, *(a.numpy() if isinstance(a, torch.Tensor) else a for a in args))

    return prepare
