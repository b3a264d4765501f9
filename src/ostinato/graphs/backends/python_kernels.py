"""Operators whose kernel on the CPU is a Python function, and those functions.

A replay calls such a function itself. The way through the dispatcher and back into Python would
lead to the same place, some twenty microseconds later when a model's weights have just passed
through the caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PythonKernel = Callable[..., object]

_KERNELS: dict[torch._ops.OpOverload, PythonKernel] = {
    # Not a kernel, but the shortest way to one; norms make this call (see ``bindings``).
    torch.ops.aten.rsqrt_.default: torch.Tensor.rsqrt_,
}


def replay_by_calling(operator: torch._ops.OpOverload, kernel: PythonKernel) -> None:
    """Have replays on the CPU call ``kernel`` for ``operator``.

    ``kernel`` must be what the operator runs on the CPU and take its arguments by position. Its
    results go into tensors that it is given; what it returns is dropped.
    """
    _KERNELS[operator] = kernel


def kernel_of(operator: torch._ops.OpOverload) -> Callable[..., object]:
    """What a replay calls for ``operator``: its Python kernel, or the operator itself."""
    return _KERNELS.get(operator, operator)
