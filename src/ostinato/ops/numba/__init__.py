"""CPU kernels compiled by Numba that replace several torch operators each.

A model that decodes one request on a CPU spends its time reading weights, and next on overhead
between operators. Like the Triton kernels, each has a reference implementation in plain torch,
which runs if Numba is not installed. Kernels take contiguous float32 arrays, trust their shapes,
and run on one thread each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Largest number of rows to process one by one; for more, torch's threads are faster.
MOST_ROWS = 64
_WORTH_SAYING_S = 2.0


@cache
def has_numba() -> bool:
    """Whether a usable Numba is installed."""
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError:
        return False
    except Exception as error:  # for example, a Numba too old for this NumPy
        logger.warning("CPU kernels are not compiled and torch runs instead: %s", error)
        return False
    return True


@cache
def load_kernels() -> Any:
    """Import the kernels, compiling them if this machine has not done so before."""
    start = time.perf_counter()
    from ostinato.ops.numba import kernels

    seconds = time.perf_counter() - start
    if seconds > _WORTH_SAYING_S:
        logger.info("compiled the CPU kernels in %.1f s; they are cached for next time", seconds)
    return kernels


def runs_compiled(*tensors: torch.Tensor) -> bool:
    """Whether this package's kernels can take these tensors."""
    return has_numba() and all(
        each.dtype is torch.float32
        and each.device.type == "cpu"
        and each.is_contiguous()
        and not (each.requires_grad and torch.is_grad_enabled())
        for each in tensors
    )


def prepare_kernel(name: str) -> Callable[..., Callable[[], object]]:
    """For ``define_for_cpu``: the named kernel, called with an operator's arguments."""

    def prepare(*args: Any) -> Callable[[], object]:
        kernel = getattr(load_kernels(), name)
        return partial(kernel, *(a.numpy() if isinstance(a, torch.Tensor) else a for a in args))

    return prepare
