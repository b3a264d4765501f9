"""Checks on the device that weights are finite, with one read for all of them."""

from __future__ import annotations

from pathlib import Path

import torch

from ostinato.errors import ModelLoadError
from ostinato.quoting import listed


class FiniteCheck:
    """Checks tensors one after the other: one pass over each, without waiting for the device."""

    def __init__(self) -> None:
        self._fits: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, *, dtype: torch.dtype) -> None:
        """Check that all of ``tensor`` is finite, also as ``dtype``."""
        if tensor.numel() == 0:
            return
        largest = torch.finfo(dtype).max
        low, high = torch.aminmax(tensor)  # a NaN makes both NaN
        self._fits[name] = (low.double() >= -largest) & (high.double() <= largest)

    def verify(self, path: Path) -> None:
        """Raise if a tensor was not finite, and name it. Waits for the device."""
        if not self._fits:
            return
        device = next(iter(self._fits.values())).device
        fits = torch.stack([each.to(device) for each in self._fits.values()]).tolist()
        bad = [name for name, fit in zip(self._fits, fits, strict=True) if not fit]
        if bad:
            raise ModelLoadError(
                f"{listed(bad)} in {path} contain NaN, infinite numbers, or numbers too large for "
                "the dtype that the model runs in; the checkpoint is damaged, or needs "
                "dtype='bfloat16' or 'float32'"
            )
