"""Compares what two runs of one step left: bit for bit, and by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ostinato.graphs.trust.comparison import describe, same_bits


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that differs: its ``name``, by how much at most, and its first difference."""

    name: str
    max_difference: float
    text: str


def differing(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """The tensors of ``got`` that differ from ``want``, in order. Synchronises."""
    return [
        Difference(
            name=name,
            max_difference=max_difference(got[name], tensor),
            text=describe(got[name], tensor),
        )
        for name, tensor in want.items()
        if not _same(got[name], tensor)
    ]


def max_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference; infinite where only one of them is a number."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    if got.dtype is torch.bool:
        return float((got != want).any())
    wide = torch.complex128 if got.is_complex() else torch.float64
    off = (got.to(wide) - want.to(wide)).abs()
    off = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, off)
    return float(off.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and same_bits(got, want)
