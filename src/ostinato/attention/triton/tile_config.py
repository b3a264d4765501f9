"""Tile configs of paged attention in Triton: from the shapes of a batch alone.

The real lengths have no say, so a graph and an eager call of the same shapes agree to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.ops.triton.launch import next_power_of_2

# Keys are split among more programs until an SM has this many. Single queries make small programs.
# Measured on an H200 with the shapes of Llama-3.2-1B and 3.1-8B.
_PROGRAMS_PER_SM = 2
_DECODE_PROGRAMS_PER_SM = 8
_MAX_SPLITS = 64
# Where one kernel does all, its programs combine what they split.
MAX_COMBINED_SPLITS = 16


class TileConfig(NamedTuple):
    """How a batch becomes programs: constants of the attention kernel and of its launch."""

    block_m: int  # rows of a tile: queries x heads of a group, at least what tensor cores take
    block_q: int  # queries of a tile
    block_n: int  # keys at a time
    num_tiles: int  # that any batch of these shapes needs at most
    num_splits: int  # of the keys of each tile
    num_warps: int
    num_stages: int


def tile_config(
    num_tokens: int,
    num_reqs: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    row_bytes: int,
    itemsize: int,
    max_keys: int,
    num_sms: int,
) -> TileConfig:
    """Blocks for batches of these shapes. Results are right for all of them, fast for even ones.

    ``row_bytes``: the longer of a key and a value of one head. ``max_keys``: room in the block
    table. The real lengths, and the host's limit on them, have no say, so a graph and an eager call
    of the same shapes agree to the bit.
    """
    group = num_heads // num_kv_heads
    widest = 128 if row_bytes <= 256 else 64
    block_n = 64 if row_bytes <= 256 else 32
    if itemsize == 4:  # no tensor cores: blocks are held in registers
        widest, block_n = 32, 32 if row_bytes <= 256 else 16
    # Where there may be prompts, tiles are made for them: single tokens wait for memory anyway.
    average = -(-num_tokens // num_reqs)
    rows = group if average == 1 else max(64, next_power_of_2(average * group))
    block_m = max(16, next_power_of_2(group), min(widest, rows))
    block_q = block_m // group
    # Each request may leave its last tile unfinished.
    num_tiles = (num_tokens + num_reqs * (block_q - 1)) // block_q
    num_warps = 8 if block_m >= 128 else 4
    programs = _PROGRAMS_PER_SM
    if average == 1 and itemsize < 4:
        block_n, num_warps, programs = 32, max(1, block_m // 16), _DECODE_PROGRAMS_PER_SM
    wanted = num_sms * programs // max(1, num_tiles * num_kv_heads)
    num_splits = max(1, min(wanted, -(-max_keys // block_n), _MAX_SPLITS))
    num_splits = 1 << (
        num_splits.bit_length() - 1
    )  # the kernel that combines them wants a power of 2
    return TileConfig(block_m, block_q, block_n, num_tiles, num_splits, num_warps, 3)


class DecodeTileConfig(NamedTuple):
    """How a decode batch becomes programs: constants of its one kernel and of the launch."""

    block_n: int  # keys at a time
    num_splits: int  # of the keys of a request, at most
    num_warps: int
    num_stages: int
    prefetch: int  # keys of each share that are asked for before the wait; a power of 2, or 0


class _Measured(NamedTuple):
    """The best config for decode batches of up to ``most_pairs`` of request and KV head per SM."""

    most_pairs: float
    block_n: int
    max_splits: int
    num_warps: int
    num_stages: int
    prefetch: int


# Half precision, measured on an H200 in whole decode steps, with contexts of 200 and 2,000 keys and
# the shapes of Llama-3.2-1B (keys of 128 bytes) and 3.1-8B (256 bytes), 1 to 256 requests. Alone,
# larger blocks are faster; in a step they take the shared memory that the next product needs to
# begin early, and cost it more than they save.
_NARROW = (
    _Measured(0.5, 32, 16, 1, 2, 64),
    _Measured(2.0, 64, 4, 2, 2, 64),
    _Measured(4.0, 128, 1, 4, 3, 0),
    _Measured(8.0, 64, 1, 1, 2, 64),
    _Measured(float("inf"), 16, 1, 1, 3, 0),
)
_BROAD = (
    _Measured(0.1, 64, 16, 2, 2, 64),
    _Measured(0.5, 32, 16, 1, 2, 0),
    _Measured(1.0, 64, 4, 2, 2, 0),
    _Measured(2.0, 16, 4, 1, 3, 0),
    _Measured(4.0, 64, 1, 4, 3, 0),
    _Measured(float("inf"), 32, 1, 1, 2, 0),
)


def decode_tile_config(
    num_reqs: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    row_bytes: int,
    itemsize: int,
    max_keys: int,
    num_sms: int,
) -> DecodeTileConfig:
    """The tile config of decode batches of these shapes; lengths have no say here either."""
    pairs = max(1, num_reqs * num_kv_heads)
    most_splits = num_sms * _DECODE_PROGRAMS_PER_SM // pairs
    if itemsize < 4 and num_heads // num_kv_heads <= 16 and row_bytes <= 256:
        table = _NARROW if row_bytes <= 128 else _BROAD
        best = next(row for row in table if pairs <= row.most_pairs * num_sms)
        num_splits = min(best.max_splits, most_splits, -(-max_keys // best.block_n))
        return DecodeTileConfig(
            best.block_n, max(1, num_splits), best.num_warps, best.num_stages, best.prefetch
        )
    # A warp for every 16 rows of 256 bytes: more of a matrix do not fit into its registers.
    rows = next_power_of_2(num_heads // num_kv_heads)
    tiles = max(1, rows // 16) * max(1, row_bytes // 256)
    block_n, num_warps, per_sm = 32, min(8, tiles), _DECODE_PROGRAMS_PER_SM
    if itemsize == 4:  # no tensor cores: blocks are held in registers
        block_n = 32 if row_bytes <= 256 else 16
        num_warps, per_sm = 4, _PROGRAMS_PER_SM
    wanted = num_sms * per_sm // pairs
    num_splits = max(1, min(wanted, -(-max_keys // block_n), MAX_COMBINED_SPLITS))
    return DecodeTileConfig(block_n, num_splits, num_warps, 3, 2 * block_n)
