"""Keeps what the caller has set in torch from changing a model: autocast, the default device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ostinato import compat

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


def without_default_device(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` with the host as default device, whatever its caller has set.

    Ours create tensors of the host without naming it.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # A default device is a function mode; looking for modes at all is quicker.
        if compat.function_stack_depth() and torch.get_default_device().type != "cpu":
            with torch.device("cpu"):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped
