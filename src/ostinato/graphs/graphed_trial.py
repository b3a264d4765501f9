"""Whether a graph's result is that of an eager call: found out by trying, before it is trusted.

A graph computes padding rows along with real ones, and its result is cut to the real rows. That is
right if row i of the result depends on row i of the arguments alone and is found where it is cut
from. Neither can be seen in a callable, so both are tried with a batch that its caller passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ostinato.errors import BatchError
from ostinato.graphs.signature import same_value
from ostinato.graphs.tree import leaves_with_path, map_tensors

# How far results may differ by rounding, of two shapes of one computation: relative to the value
# and to the size of all values. Matrix products may be in lower precision than their results.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
_LOW_PRECISION = 3e-2
# Differences up to this many tolerances are not called errors yet.
_UNCLEAR = 30.0


class Agreement(IntEnum):
    """How two results compare. UNCLEAR: they differ, and rounding may be why."""

    SAME = 0
    UNCLEAR = 1
    DIFFERENT = 2


@dataclass(frozen=True)
class OutputLayout:
    """Which dimensions of which results follow the batch."""

    scaling: tuple[tuple[tuple[int, int], ...], ...]  # per tensor: (dimension, rows per batch row)

    @classmethod
    def infer(cls, padded: Any, reference: Any, size: int, rows: int) -> OutputLayout:
        """Compare the result of ``size`` rows with that of fewer, ``rows``."""
        large, small = (list(leaves_with_path(each, "output")) for each in (padded, reference))
        if [path for path, _ in large] != [path for path, _ in small]:
            raise BatchError(
                f"the result has another structure for a batch of {size} than for one of {rows}"
            )
        scaling = []
        for (path, of_size), (_, of_rows) in zip(large, small, strict=True):
            if isinstance(of_size, torch.Tensor) and isinstance(of_rows, torch.Tensor):
                scaling.append(_scaling(path, of_size.shape, of_rows.shape, size, rows))
            elif not same_value(of_size, of_rows):
                raise BatchError(
                    f"{path} is {of_size!r} for a batch of {size} and {of_rows!r} for one of "
                    f"{rows}; values other than tensors are fixed when a graph is captured, so "
                    "return tensors only"
                )
        return cls(tuple(scaling))

    def cut(self, output: Any, rows: int) -> Any:
        """Views of the real rows of a padded result. Containers are made anew."""
        scaling = iter(self.scaling)

        def cut_one(tensor: torch.Tensor) -> torch.Tensor:
            for dim, per_row in next(scaling):
                tensor = tensor.narrow(dim, 0, rows * per_row)
            return tensor

        return map_tensors(cut_one, output)


def _scaling(
    path: str, large: torch.Size, small: torch.Size, size: int, rows: int
) -> tuple[tuple[int, int], ...]:
    if len(large) == len(small):
        dims = [dim for dim in range(len(large)) if large[dim] != small[dim]]
        if all(large[d] * rows == small[d] * size and large[d] % size == 0 for d in dims):
            return tuple((dim, large[dim] // size) for dim in dims)
    raise BatchError(
        f"{path} has shape {tuple(large)} for a batch of {size} and {tuple(small)} for one of "
        f"{rows}; each dimension must stay the same or grow in proportion to the batch"
    )


# --- comparing ------------------------------------------------------------------------------------


def differences(
    result: Any, reference: Any, *, exact_integers: bool
) -> Iterator[tuple[str, Agreement, str]]:
    """Each output that is not the same in both: its path, how it compares, and in words.

    ``exact_integers``: no floating-point number had a part in them. Synchronises.
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
    """How two tensors compare, apart from rounding. Synchronises."""
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
    """How large values are that are not there to stand out, as masks are."""
    sizes = sizes[sizes > 0]
    if sizes.numel() == 0:
        return 0.0
    ordinary = sizes[sizes <= 1000 * sizes.median()]
    return ordinary.square().mean().sqrt()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type are equal; NaN equals NaN. Synchronises."""
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def describe(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where two tensors differ first."""
    if got.shape != want.shape or got.dtype != want.dtype:
        was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (want, got))
        return f"it is {now} instead of {was}"
    same = (got == want) | (got.isnan() & want.isnan())
    first = (~same).nonzero()[0].tolist()
    where = f"[{', '.join(map(str, first))}]" if first else ""
    return f"{where or 'it'} is {got[tuple(first)].item()} instead of {want[tuple(first)].item()}"
