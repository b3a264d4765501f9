"""Tile configs of paged attention in Triton: block sizes, splits and launch options.

They follow from the shapes of a batch alone, never from its lengths or the host's limit on them, so
a graph and an eager call of the same shapes agree to the bit. What depends on lengths is decided on
the device (``StreamRule``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ostinato.attention.paged import PagedBatch
from ostinato.ops.gemm.tile_config import gpu_of
from ostinato.ops.triton.launch import next_power_of_2

# Keys are split among more programs until an SM has this many. Single queries make small programs.
# Measured on an H200 with the shapes of Llama-3.2-1B and 3.1-8B.
_PROGRAMS_PER_SM = 2
_DECODE_PROGRAMS_PER_SM = 8
_MAX_SPLITS = 64
# Of the decode kernel, whose programs combine the parts themselves.
MAX_COMBINED_SPLITS = 16
# When keys may be shared evenly, at the price of one more launch: where contexts can be this long.
_FEW_MAX_KEYS = 32768
_MANY_MAX_KEYS = 2048
_MANY_PAIRS = 8  # of a request and a KV head, per SM
# Heads 512 wide take this much in ``attend_kernel``. Hopper and an A100 have it; many others have
# 99 KB.
_MEMORY_OF_WIDE_ROWS = 135_296
# Rows of a program of the kernel for prompts: queries x heads of a group.
PREFILL_ROWS = 128
# Heads of a group, at most, in the kernel that shares all keys evenly among SMs.
STREAM_GROUP = 16


def padded_row(length: int) -> int:
    """Elements of a row as kernels hold it: a power of 2 that tensor cores take."""
    return max(16, next_power_of_2(length))


class BatchShape(NamedTuple):
    """Everything that a tile config depends on."""

    num_tokens: int
    num_reqs: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int  # of one head's key or value, whichever is longer
    itemsize: int
    max_keys: int  # room in a row of the block table
    num_sms: int
    shared_memory: int  # bytes that a program can have

    @classmethod
    def of(cls, batch: PagedBatch, num_sms: int) -> BatchShape:
        key_cache, value_cache, out = batch[:3]
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        num_tokens, num_heads, _ = out.shape
        itemsize = key_cache.itemsize
        return cls(
            num_tokens=num_tokens,
            num_reqs=batch.seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            row_bytes=padded_row(max(head_dim, value_cache.shape[3])) * itemsize,
            itemsize=itemsize,
            max_keys=batch.block_table.shape[1] * block_size,
            num_sms=num_sms,
            shared_memory=gpu_of(out.device).shared_memory if out.is_cuda else 227 << 10,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def takes_prompts(shape: BatchShape, uniform_decode: bool) -> bool:
    """Whether the kernels for Hopper attend, one to prompts and one to single queries.

    For one request only if it fills half of the SMs: other kernels split its keys. Graphs of mixed
    batches have room for as many requests as tokens, which leaves few splits for those there are.
    """
    fills = 2 * shape.num_tokens * shape.num_heads >= PREFILL_ROWS * shape.num_sms
    return not uniform_decode and shape.group <= PREFILL_ROWS and (shape.num_reqs > 1 or fills)


class StreamRule(NamedTuple):
    """When a decode batch shares its keys evenly among SMs. Both kernels decide it, on the device.

    The longest context has at least ``min_longest`` keys, and at least ``min_spread`` halves of the
    average over the requests that have any.
    """

    min_longest: int
    min_spread: int


ALWAYS = StreamRule(min_longest=0, min_spread=0)  # no kernel needs to look at the lengths


@lru_cache(maxsize=256)
def stream_rule(shape: BatchShape) -> StreamRule | None:
    """Where even shares may be faster than one program per request and KV head; None: nowhere.

    Many requests gain if their contexts differ, because SMs would wait for the longest. Few gain
    from long ones, which ``decode_kernel`` splits too coarsely; they always share, because the
    launch that finds nothing to do would cost a short step 8%. Measured on an H200 with the shape
    of Qwen3-4B: attention of 256 requests with 32 to 1,400 keys takes 13% less time, and with 128
    to 200 keys 40% more; that of one request with 8,192 keys takes 40% less.
    """
    pairs = shape.num_reqs * shape.num_kv_heads
    if shape.group > STREAM_GROUP:
        return None
    if pairs >= _MANY_PAIRS * shape.num_sms and shape.max_keys >= _MANY_MAX_KEYS:
        return StreamRule(min_longest=512, min_spread=3)
    if 2 * pairs <= shape.num_sms and shape.max_keys >= _FEW_MAX_KEYS:
        return ALWAYS
    return None


class TileConfig(NamedTuple):
    """Constants of ``attend_kernel`` and options of its launch."""

    block_m: int  # rows of a tile: queries x heads of a group, at least what tensor cores take
    block_q: int  # queries of a tile
    block_n: int  # keys at a time
    num_tiles: int  # the most that any batch of these shapes needs
    num_splits: int  # of the keys of each tile
    num_warps: int
    num_stages: int


@lru_cache(maxsize=256)  # every layer of a step asks for the same
def tile_config(shape: BatchShape) -> TileConfig:
    """Right for all batches of this shape, fast for even ones."""
    group = shape.group
    widest = 128 if shape.row_bytes <= 256 else 64
    block_n = 64 if shape.row_bytes <= 256 else 32
    if shape.itemsize == 4:  # no tensor cores: blocks are held in registers
        widest, block_n = 32, 32 if shape.row_bytes <= 256 else 16
    wide = shape.row_bytes > 256 * shape.itemsize and shape.shared_memory < _MEMORY_OF_WIDE_ROWS
    if wide:
        widest, block_n = widest // 2, 16
    # Tiles are sized for prompts wherever there may be any: single tokens wait for memory anyway.
    average = -(-shape.num_tokens // shape.num_reqs)
    rows = group if average == 1 else max(64, next_power_of_2(average * group))
    block_m = max(16, next_power_of_2(group), min(widest, rows))
    block_q = block_m // group
    # The last tile of each request may be partly filled.
    num_tiles = (shape.num_tokens + shape.num_reqs * (block_q - 1)) // block_q
    num_warps = 8 if block_m >= 128 else 4
    programs = _PROGRAMS_PER_SM
    if average == 1 and shape.itemsize < 4:
        block_n, num_warps = 16 if wide else 32, max(1, block_m // 16)
        programs = _DECODE_PROGRAMS_PER_SM
    wanted = shape.num_sms * programs // max(1, num_tiles * shape.num_kv_heads)
    num_splits = max(1, min(wanted, -(-shape.max_keys // block_n), _MAX_SPLITS))
    num_splits = 1 << (num_splits.bit_length() - 1)  # combine_kernel takes a power of 2
    return TileConfig(block_m, block_q, block_n, num_tiles, num_splits, num_warps, 3)


class DecodeTileConfig(NamedTuple):
    """Constants of ``decode_kernel`` and options of its launch."""

    block_n: int  # keys at a time
    num_splits: int  # of the keys of a request, at most
    num_warps: int
    num_stages: int
    prefetch: int  # keys of each split that are prefetched before the wait; a power of 2, or 0


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
# larger blocks are faster; in a step they take the shared memory that the next GEMM needs to
# start early, and cost it more than they save.
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


@lru_cache(maxsize=256)
def decode_tile_config(shape: BatchShape) -> DecodeTileConfig:
    """The same for decode batches: the rows of a tile are the heads of one request's group."""
    num_sms, row_bytes = shape.num_sms, shape.row_bytes
    group = shape.group
    pairs = max(1, shape.num_reqs * shape.num_kv_heads)
    if shape.itemsize < 4 and group <= 16 and row_bytes <= 256:
        table = _NARROW if row_bytes <= 128 else _BROAD
        best = next(row for row in table if pairs <= row.most_pairs * num_sms)
        most_splits = num_sms * _DECODE_PROGRAMS_PER_SM // pairs
        num_splits = min(best.max_splits, most_splits, -(-shape.max_keys // best.block_n))
        return DecodeTileConfig(
            best.block_n, max(1, num_splits), best.num_warps, best.num_stages, best.prefetch
        )
    # A warp for every 16 rows of 256 bytes: no more of a matrix fits into its registers.
    tiles = max(1, next_power_of_2(group) // 16) * max(1, row_bytes // 256)
    block_n, num_warps, programs = 32, min(8, tiles), _DECODE_PROGRAMS_PER_SM
    if shape.itemsize == 4:  # no tensor cores: blocks are held in registers
        block_n = 32 if row_bytes <= 256 else 16
        num_warps, programs = 4, _PROGRAMS_PER_SM
    wanted = num_sms * programs // pairs
    num_splits = max(1, min(wanted, -(-shape.max_keys // block_n), MAX_COMBINED_SPLITS))
    return DecodeTileConfig(block_n, num_splits, num_warps, 3, 2 * block_n)
