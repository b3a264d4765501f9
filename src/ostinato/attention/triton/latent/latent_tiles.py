"""Tile configs of latent attention in Triton: from shapes alone, like those in ``tile_config``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.gemm.tile_config import gpu_of
from ostinato.ops.triton.launch import next_power_of_2

_MAX_SPLITS = 64
# Of the parts of all splits, in float32. Each is as long as a latent vector.
_MOST_PART_BYTES = 64 << 20
# Rows of a tile, queries x heads: as many accumulators of 512 columns as eight warps hold. Their
# queries take shared memory, beside two blocks of 32 or of 64 keys. Compiled for Hopper, a program
# takes these bytes, and one of few rows 93,696, of which an SM has room for two.
_MOST_ROWS, _FEW_ROWS = 64, 16
_MEMORY_OF_32_KEYS, _MEMORY_OF_64_KEYS = 147_712, 221_696


class LatentShape(NamedTuple):
    """Everything that a tile config depends on."""

    num_tokens: int
    num_reqs: int
    num_heads: int
    rank: int
    itemsize: int
    max_keys: int  # room in a row of the block table
    num_sms: int
    shared_memory: int  # bytes that a program can have

    @classmethod
    def of(cls, batch: PagedBatch, num_sms: int) -> LatentShape:
        device = batch.out.device
        num_tokens, num_heads, rank = batch.out.shape
        return cls(
            num_tokens=num_tokens,
            num_reqs=batch.seq_lens.shape[0],
            num_heads=num_heads,
            rank=rank,
            itemsize=batch.key_cache.itemsize,
            max_keys=batch.block_table.shape[1] * batch.key_cache.shape[1],
            num_sms=num_sms,
            shared_memory=gpu_of(device).shared_memory if batch.out.is_cuda else 227 << 10,
        )


class LatentTileConfig(NamedTuple):
    """Constants of ``latent_kernel`` and options of its launch."""

    block_m: int  # rows of a tile: queries x heads
    block_q: int  # queries of a tile
    heads: int  # heads of a tile
    block_n: int  # keys at a time
    chunk: int  # columns of a latent vector in one dot; less than all without tensor cores
    num_tiles: int  # of queries, the most that any batch of these shapes needs
    num_splits: int  # of the keys of each tile, at most
    num_warps: int
    num_stages: int


@lru_cache(maxsize=256)  # every layer of a step asks for the same
def latent_tile_config(shape: LatentShape) -> LatentTileConfig:
    """Right for all batches of this shape, fast for even ones."""
    half = shape.itemsize < 4
    fits = half and shape.rank <= 512 and shape.shared_memory >= _MEMORY_OF_32_KEYS
    widest = _MOST_ROWS if fits else _FEW_ROWS
    # Tiles have several queries wherever there may be prompts.
    decode = shape.num_tokens <= shape.num_reqs
    rows = next_power_of_2(shape.num_heads) if decode else widest
    block_m = max(_FEW_ROWS, min(rows, widest))
    heads = min(shape.num_heads, block_m)
    block_q = block_m // heads
    num_tiles = (shape.num_tokens + shape.num_reqs * (block_q - 1)) // block_q
    chunk = padded_row(shape.rank) if half else min(64, padded_row(shape.rank))
    few = block_m == _FEW_ROWS
    block_n = 32 if few or shape.shared_memory < _MEMORY_OF_64_KEYS else 64
    if not half:
        block_n = 16
    programs = max(1, num_tiles * -(-shape.num_heads // heads))
    part_bytes = 4 * shape.num_tokens * shape.num_heads * shape.rank
    num_splits = min(
        shape.num_sms * (2 if few else 1) // programs,
        -(-shape.max_keys // block_n),
        _MOST_PART_BYTES // max(1, part_bytes),
        _MAX_SPLITS,
    )
    return LatentTileConfig(
        block_m=block_m,
        block_q=block_q,
        heads=heads,
        block_n=block_n,
        chunk=chunk,
        num_tiles=num_tiles,
        num_splits=max(1, num_splits),
        num_warps=4 if half and few else 8,
        num_stages=(5 if few else 3) if half else 1,  # some of them read the block table ahead
    )
