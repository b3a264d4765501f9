"""Keeps the caller's autocast from changing a model's dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` with autocast off, whatever its caller has set."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return wrapped(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped
