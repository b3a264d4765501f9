"""How a kernel is compiled: once per machine, when the module that holds it is imported.

A kernel has the types it is written with, and no others, so nothing is compiled in the middle of a
step. What was compiled is kept on disk, by Numba, which notices changes in the file of the kernel
alone: a kernel may call only what is in its own file, where its options are too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def compilers(**options: Any) -> tuple[_Decorator, Callable[[str], _Decorator]]:
    """Decorators: for functions that kernels of the same file call, and for kernels by type."""

    def kernel(signature: str) -> _Decorator:
        def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any]
            try:
                compiled = numba.njit(signature, cache=True, **options)(function)
            except Exception:
                # No directory, a full disk, a damaged file: every process compiles for itself.
                compiled = numba.njit(signature, **options)(function)
            return compiled

        return compile_it

    return numba.njit(**options), kernel
