"""The torch switches that decide which kernels a call runs; graphs are keyed by them.

A graph holds the kernels chosen under the switches in effect at capture. Under other switches an
eager call would run other kernels, so it needs another graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ostinato import compat
from ostinato.errors import ReplayMismatchError
from ostinato.graphs.trust.state_walk import SCALARS


def _switches(device_type: str) -> list[Callable[[], Any]]:
    """Readers for the switches. Each runs on every call, so each is the cheapest one available."""
    switches: list[Callable[[], Any]] = [
        lambda: autocast_dtype(device_type),
        torch.get_default_dtype,
        torch.is_inference_mode_enabled,
        compat.deterministic_algorithms,
        compat.float32_matmul_precision,
        _function_modes,
    ]
    if device_type == "cuda":
        switches += compat.cuda_switches
    return switches


is_autocast_enabled = torch.is_autocast_enabled  # by type of device


def autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _function_modes() -> tuple[Any, ...]:
    """Active function modes, such as ``with torch.device(...)``: their classes and settings."""
    depth = compat.function_stack_depth()
    if depth == 0:
        return ()
    modes = [compat.function_mode_at(index) for index in range(depth)]
    return tuple((type(mode), _plain_attributes(mode)) for mode in modes)


def _plain_attributes(thing: Any) -> tuple[tuple[str, Any], ...]:
    values = vars(thing).items()
    return tuple((name, value) for name, value in values if isinstance(value, SCALARS))


def read_numerics(device_type: str) -> tuple[Any, ...]:
    """The few switches that change results, for callers on the fast path."""
    return (
        autocast_dtype(device_type),
        compat.deterministic_algorithms(),
        compat.float32_matmul_precision(),
    )


def other_setting(name: str, was: object, now: object) -> ReplayMismatchError:
    """The error of a replay under another setting of torch than at capture."""
    return ReplayMismatchError(
        f"torch's setting of {name} was {was} when the graph was captured and is {now} now; "
        "replay under the setting of the capture, or clear_graphs() and capture again"
    )


def check_autocast(was: object, device_type: str) -> None:
    """Raise if autocast is not as at capture, where ``autocast_dtype`` gave ``was``."""
    now = autocast_dtype(device_type)
    if now is not was:
        raise other_setting("autocast", was, now)


NUMERICS = ("autocast", "deterministic algorithms", "float32 matmul precision")


class AmbientState:
    """Reads the switches for one device type, as a hashable value."""

    def __init__(self, device_type: str) -> None:
        self._reads = _switches(device_type)

    def read(self) -> tuple[Any, ...]:
        return tuple([read() for read in self._reads])
