"""Keeps misleading messages of transformers out of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_messages(logger_name: str, text: str = "") -> Iterator[None]:
    """Inside, the logger drops messages that contain ``text``; by default all of them."""

    def is_other(record: logging.LogRecord) -> bool:
        return text not in str(record.msg)

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
