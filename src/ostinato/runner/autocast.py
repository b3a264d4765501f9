"""A model has the types it was loaded with, whatever the code around it casts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``function`` run as if its caller had not switched autocast on."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return wrapped(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped
