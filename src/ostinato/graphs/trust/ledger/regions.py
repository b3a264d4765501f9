"""Named ranges of addresses, and which of them an address is in."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """Addresses from ``start`` up to ``end``, of an owner: its ``kind`` and its ``name``."""

    start: int
    end: int
    kind: str
    name: str

    @property
    def owner(self) -> tuple[str, str]:
        return self.kind, self.name


class RegionMap:
    """Finds the smallest region around an address; of equal ones, the first."""

    def __init__(self, regions: Iterable[Region]) -> None:
        given = sorted(
            (region.start, region.end - region.start, order, region)
            for order, region in enumerate(regions)
            if region.end > region.start
        )
        self._starts: list[int] = []
        self._regions: list[Region | None] = []
        # Sweep over all bounds; between two, the smallest open region is the answer.
        open_regions: list[tuple[int, int, Region]] = []  # a heap, by size
        bounds = sorted({bound for start, size, _, _ in given for bound in (start, start + size)})
        position = 0
        for bound in bounds:
            while position < len(given) and given[position][0] == bound:
                _, size, order, region = given[position]
                heapq.heappush(open_regions, (size, order, region))
                position += 1
            while open_regions and open_regions[0][2].end <= bound:
                heapq.heappop(open_regions)
            self._starts.append(bound)
            self._regions.append(open_regions[0][2] if open_regions else None)

    def find(self, address: int) -> Region | None:
        index = bisect_right(self._starts, address) - 1
        return self._regions[index] if index >= 0 else None
