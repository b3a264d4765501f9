"""The torch state that every capture runs under, whatever the caller had set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capture_ambient() -> Iterator[None]:
    """No autograd, and no cache of autocast.

    Autocast keeps the cast copy of a parameter until it is left. Made in one capture, the copy
    would be read by the next one, which would not contain the cast.
    """
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """torch.compile out of the way, if it is in use at all.

    The code it generates for the CPU calls no operators, and would be invisible to a recording.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and importing it is slow
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
