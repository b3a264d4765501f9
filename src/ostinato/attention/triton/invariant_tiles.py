"""Tiles of batch-invariant attention. They follow from shapes, and change no bit of a result."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ostinato.attention.triton.tile_config import BatchShape
from ostinato.ops.triton.launch import next_power_of_2

SEGMENT_KEYS = 256  # keys with a softmax of their own; part of the arithmetic
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64
_MAX_PART_BYTES = 64 * 2**20


class InvariantTiles(NamedTuple):
    """Constants of ``invariant_attend_kernel`` and options of its launch."""

    block_m: int  # rows of a tile: queries x heads of a group
    block_q: int  # queries of a tile
    num_tiles: int  # the most that any batch of these shapes needs
    num_splits: int  # programs that share the segments of a tile
    num_warps: int
    num_stages: int


@lru_cache(maxsize=256)  # every layer of a step asks for the same
def invariant_tiles(shape: BatchShape, uniform_decode: bool) -> InvariantTiles:
    """Right for all batches of this shape, fast for even ones."""
    group = shape.group
    num_warps, num_stages = 4, 2
    if uniform_decode:
        block_q, block_m = 1, max(16, next_power_of_2(group))
        if block_m == 16:
            num_warps, num_stages = 2, 3
    else:
        block_m = max(128 if shape.row_bytes <= 256 else 64, next_power_of_2(group))
        block_q, num_warps = block_m // group, block_m // 16
    num_tiles = (shape.num_tokens + shape.num_reqs * (block_q - 1)) // block_q
    num_segments = -(-shape.max_keys // SEGMENT_KEYS)
    wanted = shape.num_sms * _PROGRAMS_PER_SM // max(1, num_tiles * shape.num_kv_heads)
    part_bytes = shape.num_tokens * shape.num_heads * num_segments * (shape.row_bytes * 2 + 8)
    num_splits = min(wanted, num_segments, _MAX_SPLITS) if part_bytes <= _MAX_PART_BYTES else 1
    return InvariantTiles(block_m, block_q, num_tiles, max(1, num_splits), num_warps, num_stages)
