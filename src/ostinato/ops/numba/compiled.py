"""Compiles kernels: once per machine, when their module is imported.

A kernel has fixed types, so nothing is compiled in the middle of a step. Numba caches compiled code
on disk, and notices changes only in the kernel's own file: so a kernel may call only what is in its
file, where its options are too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def compilers(**options: Any) -> tuple[_Decorator, Callable[[str], _Decorator]]:
    """Decorators: one for helper functions in the same file, one for kernels by type."""

    def kernel(signature: str) -> _Decorator:
        def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any]
            try:
                compiled = numba.njit(signature, cache=True, **options)(function)
            except Exception:
                # No directory, a full disk, a damaged file: every process compiles again.
                compiled = numba.njit(signature, **options)(function)
            return compiled

        return compile_it

    return numba.njit(**options), kernel
