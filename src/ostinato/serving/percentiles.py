"""p50, p90 and p99 of times."""

from __future__ import annotations

import math
from collections.abc import Iterable

_PERCENTILES = (50, 90, 99)


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """By nearest rank, so each is one of the values; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    ranks = {percent: math.ceil(len(ordered) * percent / 100) for percent in _PERCENTILES}
    return {f"p{percent}": ordered[rank - 1] for percent, rank in ranks.items()}
