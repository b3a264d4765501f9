"""Tiles of the batch-invariant GEMM. They follow from shapes, and change no bit of a result."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ostinato.ops.triton.launch import next_power_of_2

_MOST_SMALL = 64  # rows that one tile takes, while the weight streams through


class InvariantTile(NamedTuple):
    """Constants of ``invariant_gemm_kernel`` and options of its launch."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    swap: bool  # rows of the weight are the tensor core's first operand
    bulk: bool  # tiles come by bulk copies, where alignment permits


@lru_cache(maxsize=1024)  # every layer of a step asks for the same
def invariant_tile(num_rows: int, outputs: int, gated: bool, num_sms: int) -> InvariantTile:
    """The fastest of those measured on an H200 for such a shape."""
    if num_rows <= _MOST_SMALL:
        rows = max(16, next_power_of_2(num_rows))
        return InvariantTile(rows, 64, 128, 4 if gated else 6, 4, swap=True, bulk=False)
    if gated:
        if num_rows <= 128:
            return InvariantTile(128, 64, 64, 3, 4, swap=True, bulk=True)
        if num_rows <= 512:
            return InvariantTile(256, 64, 64, 4, 8, swap=True, bulk=True)
        return InvariantTile(128, 128, 64, 4, 8, swap=False, bulk=True)
    if num_rows >= 4096:
        return InvariantTile(128, 256, 64, 4, 8, swap=False, bulk=True)
    if -(-num_rows // 256) * -(-outputs // 128) >= num_sms:
        return InvariantTile(256, 128, 64, 3, 8, swap=True, bulk=True)
    if -(-num_rows // 128) * -(-outputs // 128) > num_sms // 2:
        return InvariantTile(128, 128, 64, 4, 8, swap=True, bulk=True)
    return InvariantTile(128, 64, 64, 4, 4, swap=True, bulk=True)
