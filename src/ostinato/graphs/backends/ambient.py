"""The torch state that every capture runs under, whatever the caller had set."""

from __future__ import annotations

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
