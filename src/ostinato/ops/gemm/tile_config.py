"""Tile configs for small-M GEMMs, by a model of the GPU: for shapes that were never measured.

Plain Python: nothing here launches a kernel. ``ops.gemm.tuning`` knows the measured choices.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from ostinato.compat import runs_gluon
from ostinato.ops.triton.launch import next_power_of_2

ROW_CLASSES = (1, 8, 16, 32, 64)
MAX_ROWS = ROW_CLASSES[-1]

# Of an H200, in bytes per microsecond: an SM's part of the bandwidth if all SMs read, and what it
# reads if few others do.
_SM_SHARE = 33_000
_SM_ALONE = 55_000
_SMALL_TILE = 0.5  # of these rates, with tiles too small for Hopper's tensor cores (wgmma)
_ROUND_US = 0.3  # until the next program of an SM reads as fast as the previous one did
_SPLIT_US = 0.7  # for split-K: until the last program of a tile has seen that it is the last

# Of shared memory, for the stages of a program that has an SM to itself, or leaves room for the
# next kernel to start early.
_ROOM = 144 * 1024
_ROOM_BESIDE = 100 * 1024
_PREFETCH_BYTES = 32 * 1024  # into L2, by each program


class TileConfig(NamedTuple):
    """A tile config: constants of a kernel and of its launch."""

    block_n: int  # results per program (pairs, if gated)
    block_k: int  # inputs at a time
    num_warps: int
    num_stages: int = 1  # tiles in flight in shared memory; 1: none, weights go to registers
    split_k: int = 1  # programs that share the inputs of one tile; not for one row
    prefetch: int = 0  # tiles prefetched into L2 before the previous kernel is done

    def as_json(self) -> dict[str, int]:
        return self._asdict()


GemmChoice = TileConfig | Literal["torch"]


class Gpu(NamedTuple):
    """What a choice depends on, besides the shape. The defaults are those of an H200."""

    name: str
    num_sms: int = 132
    shared_memory: int = 227 * 1024  # bytes that one program can have
    gluon: bool = True  # whether kernels written in Gluon run


@cache
def gpu_of(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        torch.cuda.get_device_name(device),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        runs_gluon(device),
    )


class LinearShape(NamedTuple):
    """What a choice depends on, besides the GPU. ``num_rows`` stands for its row class."""

    num_rows: int
    n: int  # rows of the weight
    k: int
    dtype: torch.dtype
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.gated else self.n

    def key(self, gpu: str) -> str:
        """The key of this shape in a table."""
        flags = [name for name in ("norm", "gated", "residual") if getattr(self, name)]
        rows = row_class(self.num_rows)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{gpu}/{dtype}/{rows}/{self.n}x{self.k}/{'+'.join(flags)}"


def row_class(num_rows: int) -> int:
    """The largest number of rows in the class: 1, 2 to 8, 9 to 16, 17 to 32, 33 to 64."""
    return next(most for most in ROW_CLASSES if num_rows <= most)


def default_choice(shape: LinearShape, gpu: Gpu) -> GemmChoice:
    """Without a measurement: our kernels if the GEMM is bound by reading the weight.

    Up to 16 rows it always is. With more it is on GPUs whose tensor cores read shared memory, as
    Hopper's do; those have more than 200 KB of it.
    """
    if row_class(shape.num_rows) > 16 and gpu.shared_memory < 200 * 1024:
        return "torch"
    return candidates(shape, gpu)[0]


def candidates(shape: LinearShape, gpu: Gpu) -> list[TileConfig]:
    """At most five tile configs worth measuring, the model's choice first. torch is one more."""
    if shape.num_rows == 1:
        configs = _row_configs(shape)
    elif row_class(shape.num_rows) == 8 and gpu.gluon:
        configs = _register_configs(shape, gpu)
    else:
        configs = _tile_configs(shape, gpu)
    return list(dict.fromkeys(configs))[:5]


# --- one row --------------------------------------------------------------------------------------


def _row_configs(shape: LinearShape) -> list[TileConfig]:
    """Small programs that have all of a row in flight, or two long pieces of it.

    An SM needs 40 to 64 KB in flight, and has it in registers: two results of 2048 or 4096 inputs
    leave room for 5 to 9 programs. 4096 only if that is the whole row or divides it, because masks
    in a loop over such long blocks cost registers (225 instead of 64), and thus programs.
    """
    whole = max(64, next_power_of_2(shape.k))
    sizes = [(2, 2048, 4), (2, 4096, 4), (4, 1024, 4), (2, 1024, 4), (8, 512, 8)]
    if shape.k > 2048 and (shape.k <= 4096 or shape.k % 4096 == 0):
        sizes[:2] = sizes[1::-1]
    return [
        TileConfig(
            block_n, min(block_k, whole), num_warps, prefetch=int(block_k < min(shape.k, 2048))
        )
        for block_n, block_k, num_warps in sizes
    ]


# --- small-M, with the weight in registers --------------------------------------------------------


def _register_configs(shape: LinearShape, gpu: Gpu) -> list[TileConfig]:
    """What was fastest for Qwen3-4B and Llama-3.1-8B on an H200, by the number of programs.

    Few programs need many warps with long pieces of a row, so that enough is in flight on every SM.
    Many need none of that, and where they queue, programs of twice the results read x half as
    often. Tile configs for shared memory are not candidates: between kernels that start as early as
    these, they took half as long again.
    """
    deep, light, wide, even, long = (
        (16, 128, 8),
        (16, 64, 4),
        (32, 64, 4),
        (16, 64, 8),
        (16, 128, 4),
    )
    programs = -(-shape.outputs // 16) / gpu.num_sms
    if programs < 2:
        sizes = [deep, even, long, (32, 64, 8), light]
    elif programs < 6:
        sizes = [light, wide, long, even, deep]
    else:
        sizes = [wide, light, even, long, (32, 64, 8)]
    return [
        TileConfig(
            block_n, max(32, min(block_k, next_power_of_2(-(-shape.k // num_warps)))), num_warps
        )
        for block_n, block_k, num_warps in sizes
    ]


# --- several rows ---------------------------------------------------------------------------------


def _tile_configs(shape: LinearShape, gpu: Gpu) -> list[TileConfig]:
    """The model's choice, its second choice of tiles, the first with other stages, and so on."""
    ranked = sorted(
        (
            _config(shape, gpu, block_n, split_k)
            for block_n in (64, 128, 32, 16)
            for split_k in range(1, 9)
            if split_k == 1 or split_k * 4 * 128 <= shape.k
        ),
        # Within about 1% it is a tie, and the order above decides.
        key=lambda config: round(100 * math.log(predicted_us(shape, config, gpu))),
    )
    ranked = [config for config in ranked if _shares_all(shape.k, config)]
    best = ranked[0]
    other_k = 64 if best.block_k == 128 else 128
    other_room = _ROOM_BESIDE if best.block_n <= 64 else 216 * 1024
    if other_room == _room(shape):
        other_room = _ROOM
    configs = [
        best,
        ranked[1],
        _config(shape, gpu, best.block_n, best.split_k, room=other_room),
        _config(shape, gpu, 64, 1),
        _config(shape, gpu, best.block_n, best.split_k, block_k=other_k, min_stages=2),
    ]
    return [config for config in configs if _shares_all(shape.k, config)]


def _shares_all(k: int, config: TileConfig) -> bool:
    """Whether the last program of a tile has inputs left."""
    return (config.split_k - 1) * _num_blocks(k, config) * config.block_k < k


def _num_blocks(k: int, config: TileConfig) -> int:
    """Blocks of inputs per program."""
    return -(-k // (config.block_k * config.split_k))


def predicted_us(shape: LinearShape, config: TileConfig, gpu: Gpu) -> float:
    """Microseconds that the programs of a GEMM of several rows take to read the weight.

    Programs are handed to SMs in rounds of one per SM. In a full round each SM gets its share of
    the bandwidth. In the last round fewer SMs read, each somewhat faster: 96 of 132 still use all
    of the bandwidth, but 20 do not, so 152 programs take almost as long as 200 would. Tiles of less
    than 64 results read more slowly, and are for weights with few rows. Reading x counts a quarter,
    because it comes from L2. Split-K adds the sums that are exchanged, and the wait for the last.
    """
    rows, parts = row_class(shape.num_rows), 2 if shape.gated else 1
    num_inputs = config.block_k * _num_blocks(shape.k, config)
    num_bytes = parts * config.block_n * num_inputs * shape.dtype.itemsize
    sums = parts * config.block_n * rows * 4
    if config.split_k > 1:
        num_bytes += sums
    rate = 1.0 if config.block_n >= 64 else _SMALL_TILE
    alone = rate * _SM_ALONE / (1 + rows / (4 * parts * config.block_n))

    def round_us(programs: int) -> float:
        together = min(rate * gpu.num_sms * _SM_SHARE, programs * alone)
        return _ROUND_US + programs * num_bytes / together if programs else 0.0

    rounds, rest = divmod(_num_tiles(shape, config.block_n) * config.split_k, gpu.num_sms)
    us = rounds * round_us(gpu.num_sms) + round_us(rest)
    if config.split_k > 1:
        us += _SPLIT_US + config.split_k * sums / (2 * _SM_ALONE)
    return us


def _num_tiles(shape: LinearShape, block_n: int) -> int:
    return -(-shape.outputs // block_n)


def _room(shape: LinearShape) -> int:
    """Attention, which follows a GEMM with only a norm, gains most from an early start."""
    qkv = shape.norm and not shape.gated and row_class(shape.num_rows) <= 16
    return _ROOM_BESIDE if qkv else _ROOM


def _config(
    shape: LinearShape,
    gpu: Gpu,
    block_n: int,
    split_k: int,
    *,
    block_k: int = 128,
    min_stages: int = 4,
    room: int | None = None,
) -> TileConfig:
    """Fill ``room`` with stages, so that tens of KB are in flight on every SM.

    Where programs queue for SMs, three share an SM, so that the others read while one starts or
    ends; and they prefetch nothing, because most of them start after the previous kernel. Pieces of
    a row are ``block_k`` long, or 64 if ``min_stages`` of those do not fit: long ones are read
    faster, if there are enough of them.
    """
    rows, parts = row_class(shape.num_rows), 2 if shape.gated else 1
    room = _room(shape) if room is None else room
    queue = _num_tiles(shape, block_n) * split_k > 4 * gpu.num_sms
    if queue:
        room, min_stages = max(room, _ROOM) // 2, 2
    room = min(room, int(0.95 * gpu.shared_memory))
    bytes_per_k = (parts * block_n + rows) * shape.dtype.itemsize
    if min_stages * block_k * bytes_per_k > room:
        block_k = 64
    blocks = -(-shape.k // (block_k * split_k))
    stages = max(2, min(room // (block_k * bytes_per_k), blocks + 1, 9))
    tile = parts * block_n * block_k * shape.dtype.itemsize
    prefetch = 0 if queue else min(max(1, _PREFETCH_BYTES // tile), blocks)
    return TileConfig(block_n, block_k, 8 if block_n >= 128 else 4, stages, split_k, prefetch)
