"""The two differences that are not mismatches: between eager runs themselves, and by rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ostinato.graphs.trust.shadow.call_log import CallLog
from ostinato.graphs.trust.shadow.differences import differing, max_difference

# How far a graph may be from an eager run, in differences between eager runs. Of three runs, the
# largest difference of a pair is a small sample of what the order of sums can do.
_SPREADS = 4.0
# Roundings of a row in one such layer: GEMM, activation, GEMM, weighted sum, and their inputs.
_ROUNDINGS = 8
_FLOAT32 = torch.finfo(torch.float32).eps  # GEMMs of narrower types sum in it


def spread_of(runs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """By name, the largest difference between two of the runs; only where there is one."""
    spread: dict[str, float] = {}
    for index, one in enumerate(runs):
        for other in runs[index + 1 :]:
            for difference in differing(one, other):
                most = max(spread.get(difference.name, 0.0), difference.max_difference)
                spread[difference.name] = most
    return spread


def is_beyond(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], spread: Mapping[str, float]
) -> bool:
    """Whether ``got`` is further from ``want`` than eager runs are from each other.

    Integers that follow from numbers that vary, such as sampled tokens, may be any.
    """
    varies = any(want[name].is_floating_point() for name in spread)
    return any(
        max_difference(got[name], want[name]) > _SPREADS * spread.get(name, 0.0)
        for name in want
        if want[name].is_floating_point() or not varies
    )


def within_rounding(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    num_layers: int,
    log: CallLog,
) -> bool:
    """Whether all differences may be rounding in ``num_layers`` layers that group rows.

    A sum of K products that is added up in another order changes by about sqrt(K) roundings of the
    type it is summed in (Higham and Mary, 2019), and its result is rounded once more. All are
    relative to the results, and those of layers add up at worst. K is the widest row in the
    ``log``. Integers that follow from such numbers, such as sampled tokens, may be any.
    """
    if num_layers == 0:
        return False
    in_sums = math.sqrt(max(log.widths, default=1)) * _FLOAT32
    for name, tensor in want.items():
        if not tensor.is_floating_point():
            continue
        size = float(tensor.double().abs().nan_to_num(nan=0.0).max()) if tensor.numel() else 0.0
        allowed = num_layers * _ROUNDINGS * (torch.finfo(tensor.dtype).eps + in_sums) * size
        if max_difference(got[name], tensor) > allowed:
            return False
    return True
