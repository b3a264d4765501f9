"""How a kernel is compiled: once per machine, when the module that holds it is imported.

A kernel has the types it is written with, and no others: nothing is compiled in the middle of a
step. What was compiled is kept on disk, by Numba, which looks at the file of the kernel alone: a
kernel may call only what is in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # dividing does not look for zeros
    # Sums in any order, and multiply-adds, or nothing would be vectorised. NaN and infinities keep
    # their meaning.
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
}

inlined = numba.njit(**_OPTIONS)  # for functions that kernels of the same file call


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: a function of these types, compiled."""

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled: Callable[..., Any] = numba.njit(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError:  # no directory to keep it in: compiled anew by every process
            compiled = numba.njit(signature, **_OPTIONS)(function)
        return compiled

    return compile_it
