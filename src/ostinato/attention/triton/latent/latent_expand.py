# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Keys and values of every head for the prompts of a batch, from rows of the latent cache.

They go to a paged cache of their own, in blocks as long as the latent cache's, for the kernels of
ordinary attention. One kernel decides on the device which requests are expanded, and gives them
blocks (``latent_plan``); the other projects. Launches depend on shapes alone, so graphs hold them.
The reference is ``latent_cpu.attend_expanded``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ostinato.attention.latent_expansion import expanded_rows
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.latent.latent_plan import plan_expansion
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.gemm.tile_config import gpu_of
from ostinato.ops.triton.launch import launch


@triton.jit
def latent_expand_kernel(
    cache,
    up,
    sources,
    num_used,
    keys,
    values,
    cache_block_stride,
    cache_slot_stride,
    up_head_stride,
    up_row_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Programs take turns with BLOCK_M rows of one head of ``keys`` and ``values`` [N, heads, ...].

    Only the blocks in use are written. Rows of slots that their request has not written hold
    anything.
    """
    num_rows = tl.load(num_used) * BLOCK_SIZE
    n = tl.arange(0, NOPE_PAD)
    e = tl.arange(0, VALUE_PAD)
    r = tl.arange(0, ROPE_PAD)
    dtype = keys.dtype.element_ty
    for item in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M) * NUM_HEADS, tl.num_programs(0)):
        head = item % NUM_HEADS
        row = item // NUM_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
        there = (row < num_rows)[:, None]
        source = tl.load(sources + row // BLOCK_SIZE, mask=row < num_rows, other=0)
        slot = source.to(tl.int64) * cache_block_stride + row % BLOCK_SIZE * cache_slot_stride
        rows = cache + slot[:, None]
        to_keys = up + head * up_head_stride + n[:, None] * up_row_stride
        to_values = up + head * up_head_stride + (NOPE + e)[:, None] * up_row_stride
        key = tl.zeros([BLOCK_M, NOPE_PAD], dtype=tl.float32)
        value = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
        for first in range(0, RANK, CHUNK):
            c = first + tl.arange(0, CHUNK)[None, :]
            x = tl.load(rows + c, mask=there & (c < RANK), other=0.0).to(up.dtype.element_ty)
            w = tl.load(to_keys + c, mask=(n < NOPE)[:, None] & (c < RANK), other=0.0)
            key = tl.dot(x, tl.trans(w), key, input_precision="ieee")
            w = tl.load(to_values + c, mask=(e < VALUE_DIM)[:, None] & (c < RANK), other=0.0)
            value = tl.dot(x, tl.trans(w), value, input_precision="ieee")
        place = (row.to(tl.int64) * NUM_HEADS + head)[:, None]
        target = keys + place * (NOPE + ROPE)
        tl.store(target + n[None, :], key.to(dtype), mask=there & (n < NOPE)[None, :])
        rope = tl.load(rows + RANK + r[None, :], mask=there & (r < ROPE)[None, :], other=0.0)
        tl.store(target + NOPE + r[None, :], rope.to(dtype), mask=there & (r < ROPE)[None, :])
        target = values + place * VALUE_DIM + e[None, :]
        tl.store(target, value.to(dtype), mask=there & (e < VALUE_DIM)[None, :])


class Expanded(NamedTuple):
    """``batch``: all tokens, as ordinary attention takes them; only expanded requests have keys.

    ``absorbed_lens`` [R]: the keys of the other requests.
    """

    batch: PagedBatch
    absorbed_lens: torch.Tensor


def expand_latent(
    up: torch.Tensor, batch: PagedBatch, rope: int, least: int, num_programs: int
) -> Expanded:
    """Expand the keys of requests with ``least`` queries or more, as far as there is room.

    ``up`` [heads, nope + value_dim, rank], ``batch``: of the latent cache, whose new rows are
    stored; ``out`` [T, heads, value_dim]. Rows of ``up`` must be in one piece.
    """
    cache, out, block_size = batch.key_cache, batch.out, batch.key_cache.shape[1]
    num_tokens, num_heads, value_dim = out.shape
    nope, rank = up.shape[1] - value_dim, up.shape[2]
    most = min(batch.seq_lens.shape[0], num_tokens // least)
    row_bytes = num_heads * (nope + rope + value_dim) * out.itemsize
    num_rows = expanded_rows(num_tokens, batch.block_table.shape[1] * block_size, row_bytes)
    num_rows += most * (block_size - 1)  # each request's last block may be partly filled
    # Triton compiles a separate kernel for strides that 16 does not divide.
    capacity = -(-num_rows // (16 * block_size)) * 16
    plan = plan_expansion(batch, capacity, least, most)
    keys = out.new_empty((capacity, block_size, num_heads, nope + rope))
    values = out.new_empty((capacity, block_size, num_heads, value_dim))
    tiles = _tiles(out, padded_row(nope) + padded_row(value_dim))
    num_items = -(-capacity * block_size // tiles.block_m) * num_heads
    launch(
        latent_expand_kernel,
        (min(num_items, num_programs),),
        (cache, up, plan.sources, plan.num_used, keys, values),
        (*cache.stride()[:2], *up.stride()[:2]),
        NUM_HEADS=num_heads,
        RANK=rank,
        NOPE=nope,
        ROPE=rope,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        NOPE_PAD=padded_row(nope),
        ROPE_PAD=padded_row(rope),
        VALUE_PAD=padded_row(value_dim),
        BLOCK_M=tiles.block_m,
        CHUNK=min(tiles.chunk, padded_row(rank)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    own = batch._replace(
        key_cache=keys,
        value_cache=values,
        query_start_loc=plan.starts,
        seq_lens=plan.lens,
        block_table=plan.table,
    )
    return Expanded(own, plan.absorbed_lens)


class _Tiles(NamedTuple):
    """Constants of ``latent_expand_kernel`` and options of its launch."""

    block_m: int
    chunk: int  # columns of latent vectors at a time
    num_warps: int
    num_stages: int


def _tiles(out: torch.Tensor, width: int) -> _Tiles:
    """For heads of ``width`` columns of keys, without RoPE, and values together."""
    if out.itemsize == 4:  # no tensor cores: blocks are held in registers
        return _Tiles(32, 32, 4, 1)
    shared_memory = gpu_of(out.device).shared_memory if out.is_cuda else 227 << 10
    block_m, chunk = 128, 64
    stage = (block_m + width) * chunk * out.itemsize
    return _Tiles(block_m, chunk, 8, max(1, min(3, shared_memory // stage)))
