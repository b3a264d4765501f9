"""Kernels for the CPU in Python that Numba compiles, for what torch takes several operators for.

A model that decodes one request on a CPU spends its time reading weights; what comes next is the
way from one operator to the other. Like the Triton kernels, each stands beside a twin in plain
torch, which runs where Numba is not installed. Kernels take arrays of float32 in one piece, trust
their shapes, and are one thread each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Of a matrix whose rows are worked on one by one; for more, torch has threads.
MOST_ROWS = 64
_WORTH_SAYING_S = 2.0


@cache
def has_numba() -> bool:
    """Whether there is a Numba that can be used."""
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError:
        return False
    except Exception as error:  # as of one that does not know this NumPy yet
        logger.warning("CPU kernels are not compiled, torch runs instead: numba says %s", error)
        return False
    return True


@cache
def load_kernels() -> Any:
    """The module of the kernels. Compiles them, if that was never done on this machine."""
    start = time.perf_counter()
    from ostinato.ops.numba import kernels

    seconds = time.perf_counter() - start
    if seconds > _WORTH_SAYING_S:
        logger.info("compiled the CPU kernels in %.1f s; they are kept for the next time", seconds)
    return kernels


def runs_compiled(*tensors: torch.Tensor) -> bool:
    """Whether kernels of this package can take these tensors."""
    return has_numba() and all(
        each.dtype is torch.float32
        and each.device.type == "cpu"
        and each.is_contiguous()
        and not (each.requires_grad and torch.is_grad_enabled())
        for each in tensors
    )


def prepare_kernel(name: str) -> Callable[..., Callable[[], object]]:
    """For ``define_for_cpu``: the kernel of that name, with an operator's arguments."""

    def prepare(*args: Any) -> Callable[[], object]:
        kernel = getattr(load_kernels(), name)
        return partial(kernel, *(a.numpy() if isinstance(a, torch.Tensor) else a for a in args))

    return prepare
