"""transformers' own progress bars, which it shows while it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Turn them off unless they are ``shown``; for all threads, but it is only what they print."""
    from transformers.utils import logging

    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
