"""Compares two results of the same computation, allowing for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch

from ostinato.graphs.capture.signature import same_value
from ostinato.graphs.tree import leaves_with_path

# Allowed rounding difference between two shapes of one computation, relative to the value and to
# the typical magnitude. GEMMs may run in lower precision than their outputs.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
_LOW_PRECISION = 3e-2
# Differences up to this many tolerances are inconclusive rather than errors.
_UNCLEAR = 30.0


class Agreement(IntEnum):
    """How two results compare. UNCLEAR: they differ, possibly because of rounding."""

    SAME = 0
    UNCLEAR = 1
    DIFFERENT = 2


def differences(
    result: Any, reference: Any, *, exact_integers: bool
) -> Iterator[tuple[str, Agreement, str]]:
    """Yield each output that differs: its path, how it compares, and a description.

    ``exact_integers``: integers were computed without floating-point inputs. Synchronises.
    """
    pairs = zip(
        leaves_with_path(result, "output"), leaves_with_path(reference, "output"), strict=True
    )
    for (path, got), (_, want) in pairs:
        if isinstance(got, torch.Tensor):
            agreement = compare(got, want, exact_integers=exact_integers)
            if agreement is not Agreement.SAME:
                yield path, agreement, describe(got, want)
        elif not same_value(got, want):
            yield path, Agreement.DIFFERENT, f"{got!r} instead of {want!r}"


def compare(got: torch.Tensor, want: torch.Tensor, *, exact_integers: bool) -> Agreement:
    """Compare two tensors, allowing for rounding. Synchronises."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return Agreement.DIFFERENT
    if same_bits(got, want):
        return Agreement.SAME
    if not (got.is_floating_point() or got.is_complex()):
        return Agreement.DIFFERENT if exact_integers else Agreement.UNCLEAR
    tolerance = _TOLERANCE.get(got.dtype, _LOW_PRECISION)
    if got.is_cuda and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, _LOW_PRECISION)
    wide = torch.complex128 if got.is_complex() else torch.float64
    a, b = got.to(wide), want.to(wide)
    finite = b.isfinite()
    off = (a - b).abs()
    allowed = tolerance * (b.abs() + _typical(b[finite].abs()))
    wrong_kind = (finite != a.isfinite()) | (~finite & (a != b) & ~(a.isnan() & b.isnan()))
    if not bool((wrong_kind | (finite & (off > allowed))).any()):
        return Agreement.SAME
    far = wrong_kind | (finite & (off > _UNCLEAR * allowed))
    return Agreement.DIFFERENT if bool(far.any()) else Agreement.UNCLEAR


def _typical(sizes: torch.Tensor) -> torch.Tensor | float:
    """Typical magnitude of the values, ignoring outliers such as mask fill values."""
    sizes = sizes[sizes > 0]
    if sizes.numel() == 0:
        return 0.0
    ordinary = sizes[sizes <= 1000 * sizes.median()]
    return ordinary.square().mean().sqrt()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same shape and type are equal; NaN equals NaN. Synchronises."""
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def describe(got: torch.Tensor, want: torch.Tensor) -> str:
    """Describe the first difference between two tensors."""
    if got.shape != want.shape or got.dtype != want.dtype:
        was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (want, got))
        return f"it is {now} instead of {was}"
    same = (got == want) | (got.isnan() & want.isnan())
    first = (~same).nonzero()[0].tolist()
    where = f"[{', '.join(map(str, first))}]" if first else ""
    return f"{where or 'it'} is {got[tuple(first)].item()} instead of {want[tuple(first)].item()}"
