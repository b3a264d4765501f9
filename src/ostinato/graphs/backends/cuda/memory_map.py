"""Lists the memory of torch's CUDA allocator, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ostinato import compat
from ostinato.graphs.backends.graph_node import MemoryRange, RangeKind

PoolId = tuple[int, int]
_NO_POOL = (0, 0)


def torch_memory(pool: PoolId | None, workspaces: Iterable[PoolId] = ()) -> list[MemoryRange]:
    """All memory that torch has from its devices, and which of it is free.

    ``pool``: the pool of the graphs in question, ``workspaces``: the pools of library workspaces.
    """
    segments: list[dict[str, Any]] = compat.memory_snapshot()["segments"]
    found: list[MemoryRange] = []
    theirs = frozenset(workspaces)
    for segment in segments:
        owner = tuple(segment["segment_pool_id"])
        start, end = segment["address"], segment["address"] + segment["total_size"]
        if owner == pool:
            found.append(MemoryRange(start, end, RangeKind.POOL))
        elif owner in theirs:
            found.append(MemoryRange(start, end, RangeKind.WORKSPACE))
        elif owner != _NO_POOL:
            # Graphs of that pool may use its free blocks, and hold outputs there.
            found.append(MemoryRange(start, end, RangeKind.OTHER_POOL))
        else:
            found += _blocks(start, segment["blocks"])
    return found


def _blocks(start: int, blocks: Iterable[dict[str, Any]]) -> Iterator[MemoryRange]:
    for block in blocks:
        end = start + block["size"]
        in_use = block["state"] == "active_allocated"
        yield MemoryRange(start, end, RangeKind.ALLOCATED if in_use else RangeKind.FREE)
        start = end
