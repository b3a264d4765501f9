"""Tile configs for the GEMMs of a mixture of experts, by the load of an expert.

Plain Python: nothing here launches a kernel. An expert with few tokens is bound by reading its
weights: tiles are small enough that three programs share an SM, so that two read while one starts
or ends. With many tokens it is bound by the tensor cores: tiles are large.
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.ops.triton.launch import next_power_of_2

_BLOCK_MS = (16, 128)  # the least that tensor cores take, and the most that pays
_STREAM_ROOM = 72 * 1024  # bytes of shared memory for the stages of one of three programs on an SM
_COMPUTE_ROOM = 200 * 1024


class ExpertTiles(NamedTuple):
    """Constants of ``expert_tile_kernel`` and of its launch, but for BLOCK_M."""

    block_n: int  # results per program (pairs, if gated)
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: int  # tiles prefetched into L2 before the previous kernel is done


def block_rows(num_pairs: int, num_experts: int) -> int:
    """BLOCK_M: twice the average load, so that few experts have more than one block."""
    average = -(-num_pairs // num_experts)
    least, most = _BLOCK_MS
    return min(max(next_power_of_2(2 * average), least), most)


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that ``num_pairs`` can make: every expert has one that is not full."""
    experts = min(num_pairs, num_experts)
    return experts + (num_pairs - experts) // block_m


def expert_tiles(
    block_m: int,
    outputs: int,
    inner: int,
    itemsize: int,
    *,
    gated: bool,
    shared_memory: int = 227 * 1024,
) -> ExpertTiles:
    """The tiles of a GEMM with ``outputs`` results (pairs, if gated) of ``inner`` inputs."""
    parts = 2 if gated else 1
    compute = block_m == _BLOCK_MS[1] and itemsize == 2 and shared_memory > 200 * 1024
    sizes: tuple[int, ...]
    if compute:
        block_n, num_warps, room, sizes = 128, 8, _COMPUTE_ROOM, (64,)
    else:
        block_n, num_warps, room, sizes = 128 // parts, 4, _STREAM_ROOM, (128, 64)
        if block_m >= 64:
            num_warps = 8
    block_n = max(16, min(block_n, next_power_of_2(outputs)))
    room = min(room, int(0.95 * shared_memory))
    bytes_per_k = (parts * block_n + block_m) * itemsize
    fitting = (k for k in sizes if 2 * k * bytes_per_k <= room and k < 2 * inner)
    block_k = next(fitting, 32)
    blocks = -(-inner // block_k)
    stages = max(2, min(room // (block_k * bytes_per_k), blocks + 1, 5))
    return ExpertTiles(block_n, block_k, num_warps, stages, 0 if compute else min(2, blocks))
