# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Keys and values of every head for the prompts of a batch, from rows of the latent cache.

They go to a paged cache of their own, in blocks as long as the latent cache's, for the kernels of
ordinary attention. One kernel decides on the device which requests are expanded, and gives them
blocks; the other projects. Launches depend on shapes alone, so graphs hold them. The reference is
``latent_cpu.attend_expanded``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ostinato.attention.latent_expansion import expanded_rows
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.gemm.tile_config import gpu_of
from ostinato.ops.triton.launch import launch

# Requests that a program examines at a time, and blocks that it writes.
_SEARCH = tl.constexpr(256)


@triton.jit
def _wanted(request, there, query_start_loc, seq_lens, max_keys, capacity, least, BLOCK_SIZE):
    """The keys of ``request``, and its blocks if it has ``least`` queries or more, else 0."""
    start = tl.load(query_start_loc + request, mask=there, other=0)
    stop = tl.load(query_start_loc + request + 1, mask=there, other=0)
    # Only dummy batches of a capture claim more keys than the table has room for.
    length = tl.minimum(tl.load(seq_lens + request, mask=there, other=0), max_keys)
    blocks = tl.cdiv(length, BLOCK_SIZE)
    wants = (tl.minimum(stop - start, length) >= least) & (blocks <= capacity)
    return length, tl.where(wants, blocks, 0)


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "capacity", "least"])
def latent_plan_kernel(
    query_start_loc,
    seq_lens,
    block_table,
    sources,
    expanded_table,
    expanded_lens,
    absorbed_lens,
    num_reqs,
    max_keys,
    capacity,
    least,
    table_stride,
    expanded_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per request: whether it is expanded, and where.

    Requests with ``least`` queries or more are given blocks in order, as long as ``capacity``
    lasts. ``sources`` [capacity]: the block of the latent cache that each is made from, or -1.
    """
    request = tl.program_id(0)
    before = 0
    for first in range(0, request, _SEARCH):
        other = first + tl.arange(0, _SEARCH)
        _, blocks = _wanted(
            other, other < request, query_start_loc, seq_lens, max_keys, capacity, least, BLOCK_SIZE
        )
        before += tl.sum(blocks, axis=0)
    length, blocks = _wanted(
        request, True, query_start_loc, seq_lens, max_keys, capacity, least, BLOCK_SIZE
    )
    fits = (blocks > 0) & (before + blocks <= capacity)
    tl.store(expanded_lens + request, tl.where(fits, length, 0))
    tl.store(absorbed_lens + request, tl.where(fits, 0, length))
    stop = before + blocks
    if request == num_reqs - 1:
        stop = tl.maximum(stop, capacity)
    for first in range(before, tl.minimum(stop, capacity), _SEARCH):
        block = first + tl.arange(0, _SEARCH)
        index = block - before
        own = fits & (index < blocks)
        source = tl.load(
            block_table + request.to(tl.int64) * table_stride + index, mask=own, other=-1
        )
        tl.store(sources + block, source, mask=block < tl.minimum(stop, capacity))
        tl.store(expanded_table + request.to(tl.int64) * expanded_stride + index, block, mask=own)


@triton.jit(do_not_specialize=["num_rows"])
def latent_expand_kernel(
    cache,
    up,
    sources,
    keys,
    values,
    num_rows,
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
    """One program per BLOCK_M rows of ``keys`` and ``values`` [num_rows, NUM_HEADS, ...], and head.

    Rows of blocks without a source are not written. Those of slots that the request has not
    written hold anything.
    """
    tile = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    source = tl.load(sources + row // BLOCK_SIZE, mask=row < num_rows, other=-1)
    if tl.max(source, axis=0) < 0:
        return
    there = (source >= 0)[:, None]
    slot = source.to(tl.int64) * cache_block_stride + row % BLOCK_SIZE * cache_slot_stride
    rows = cache + slot[:, None]
    n = tl.arange(0, NOPE_PAD)
    e = tl.arange(0, VALUE_PAD)
    r = tl.arange(0, ROPE_PAD)
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
    dtype = keys.dtype.element_ty
    target = keys + place * (NOPE + ROPE)
    tl.store(target + n[None, :], key.to(dtype), mask=there & (n < NOPE)[None, :])
    rope = tl.load(rows + RANK + r[None, :], mask=there & (r < ROPE)[None, :], other=0.0)
    tl.store(target + NOPE + r[None, :], rope.to(dtype), mask=there & (r < ROPE)[None, :])
    target = values + place * VALUE_DIM + e[None, :]
    tl.store(target, value.to(dtype), mask=there & (e < VALUE_DIM)[None, :])


class Expanded(NamedTuple):
    """``batch``: requests with expanded keys, as ordinary attention takes them; no keys for others.

    ``absorbed_lens`` [R]: the keys of the others.
    """

    batch: PagedBatch
    absorbed_lens: torch.Tensor


def expand_latent(up: torch.Tensor, batch: PagedBatch, rope: int, least: int) -> Expanded:
    """Expand the keys of requests with ``least`` queries or more, as far as there is room.

    ``up`` [heads, nope + value_dim, rank], ``batch``: of the latent cache, whose new rows are
    stored; ``out`` [T, heads, value_dim]. Rows of ``up`` must be in one piece.
    """
    cache, out, query_start_loc, block_table = (
        batch.key_cache, batch.out, batch.query_start_loc, batch.block_table,
    )  # fmt: skip
    num_tokens, num_heads, value_dim = out.shape
    num_reqs, block_size = batch.seq_lens.shape[0], cache.shape[1]
    nope, rank = up.shape[1] - value_dim, up.shape[2]
    max_keys = block_table.shape[1] * block_size
    row_bytes = num_heads * (nope + rope + value_dim) * out.itemsize
    num_rows = expanded_rows(num_tokens, max_keys, row_bytes)
    # Each request's last block may be partly filled.
    num_rows += min(num_reqs, num_tokens // least) * (block_size - 1)
    capacity = -(-num_rows // block_size)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=out.device, dtype=torch.int32)

    sources, table = integers(capacity), integers(num_reqs, capacity)
    expanded_lens, absorbed_lens = integers(num_reqs), integers(num_reqs)
    launch(
        latent_plan_kernel,
        (num_reqs,),
        (
            query_start_loc, batch.seq_lens, block_table, sources, table, expanded_lens,
            absorbed_lens,
        ),
        (num_reqs, max_keys, capacity, least, block_table.stride(0), table.stride(0)),
        BLOCK_SIZE=block_size,
        num_warps=4,
    )  # fmt: skip
    keys = out.new_empty((capacity, block_size, num_heads, nope + rope))
    values = out.new_empty((capacity, block_size, num_heads, value_dim))
    tiles = _tiles(out, padded_row(nope) + padded_row(value_dim))
    launch(
        latent_expand_kernel,
        (-(-capacity * block_size // tiles.block_m) * num_heads,),
        (cache, up, sources, keys, values),
        (capacity * block_size, *cache.stride()[:2], *up.stride()[:2]),
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
        key_cache=keys, value_cache=values, seq_lens=expanded_lens, block_table=table
    )
    return Expanded(own, absorbed_lens)


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
