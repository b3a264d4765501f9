"""transformers' own progress bars, which it shows while it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Turn them off unless they are ``shown``; for all threads, but it is only what they print."""
    from transformers.utils import logging

    bars: Any = logging  # has no types
    if shown or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
