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

# Requests that a program examines at a time, and entries that it writes.
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


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "capacity", "least", "most"])
def latent_plan_kernel(
    query_start_loc,
    seq_lens,
    block_table,
    absorbed_lens,
    starts,
    lens,
    table,
    sources,
    num_used,
    num_reqs,
    max_keys,
    capacity,
    least,
    most,
    block_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per request: whether it is expanded, and where.

    Requests with ``least`` queries or more are given blocks in order, as long as ``capacity``
    lasts: once one does not fit, none after it does. ``sources``: the block of the latent cache
    that each of the ``num_used`` blocks is made from.

    ``starts`` [2 * most + 2], ``lens`` and ``table`` describe another batch of the same tokens: its
    request 2 i + 1 is the one expanded as number i; those in between are the tokens between them,
    without keys.
    """
    request = tl.program_id(0)
    before = 0
    number = 0
    for first in range(0, request, _SEARCH):
        other = first + tl.arange(0, _SEARCH)
        _, blocks = _wanted(
            other, other < request, query_start_loc, seq_lens, max_keys, capacity, least, BLOCK_SIZE
        )
        before += tl.sum(blocks, axis=0)
        number += tl.sum((blocks > 0).to(tl.int32), axis=0)
    length, blocks = _wanted(
        request, True, query_start_loc, seq_lens, max_keys, capacity, least, BLOCK_SIZE
    )
    fits = (blocks > 0) & (before + blocks <= capacity) & (number < most)
    tl.store(absorbed_lens + request, tl.where(fits, 0, length))
    if fits:
        tl.store(starts + 2 * number + 1, tl.load(query_start_loc + request))
        tl.store(starts + 2 * number + 2, tl.load(query_start_loc + request + 1))
        tl.store(lens + 2 * number, 0)
        tl.store(lens + 2 * number + 1, length)
        own = table + (2 * number + 1) * table_stride
        its_blocks = block_table + request.to(tl.int64) * block_table_stride
        for first in range(0, blocks, _SEARCH):
            index = first + tl.arange(0, _SEARCH)
            there = index < blocks
            source = tl.load(its_blocks + index, mask=there, other=0)
            tl.store(sources + before + index, source, mask=there)
            tl.store(own + index, before + index, mask=there)
    if request == num_reqs - 1:
        _finish(
            query_start_loc, seq_lens, starts, lens, num_used,
            num_reqs, max_keys, capacity, least, most, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit
def _finish(
    query_start_loc,
    seq_lens,
    starts,
    lens,
    num_used,
    num_reqs,
    max_keys,
    capacity,
    least,
    most,
    BLOCK_SIZE,
):
    """What follows the last request that is expanded."""
    total = 0
    used = 0
    number = 0
    for first in range(0, num_reqs, _SEARCH):
        other = first + tl.arange(0, _SEARCH)
        _, blocks = _wanted(
            other,
            other < num_reqs,
            query_start_loc,
            seq_lens,
            max_keys,
            capacity,
            least,
            BLOCK_SIZE,
        )
        fits = (blocks > 0) & (total + tl.cumsum(blocks, axis=0) <= capacity)
        total += tl.sum(blocks, axis=0)
        used += tl.sum(tl.where(fits, blocks, 0), axis=0)
        number += tl.sum(fits.to(tl.int32), axis=0)
    tl.store(num_used, used)
    tl.store(starts, 0)
    num_tokens = tl.load(query_start_loc + num_reqs)
    for first in range(2 * number, 2 * most + 1, _SEARCH):
        entry = first + tl.arange(0, _SEARCH)
        tl.store(lens + entry, 0, mask=entry < 2 * most + 1)
        tl.store(starts + entry + 1, num_tokens, mask=entry < 2 * most + 1)


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
    capacity = -(-num_rows // block_size)
    starts, lens, table, sources, num_used, rest = _plan(batch, capacity, least, most)
    keys = out.new_empty((capacity, block_size, num_heads, nope + rope))
    values = out.new_empty((capacity, block_size, num_heads, value_dim))
    tiles = _tiles(out, padded_row(nope) + padded_row(value_dim))
    num_items = -(-capacity * block_size // tiles.block_m) * num_heads
    launch(
        latent_expand_kernel,
        (min(num_items, num_programs),),
        (cache, up, sources, num_used, keys, values),
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
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table,
    )
    return Expanded(own, rest)


class _Plan(NamedTuple):
    """Tensors that ``latent_plan_kernel`` writes."""

    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    sources: torch.Tensor
    num_used: torch.Tensor
    absorbed_lens: torch.Tensor


def _plan(batch: PagedBatch, capacity: int, least: int, most: int) -> _Plan:
    """``capacity``: blocks that there are; ``most``: requests that can be expanded at all."""
    num_reqs, block_size = batch.seq_lens.shape[0], batch.key_cache.shape[1]

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=batch.out.device, dtype=torch.int32)

    plan = _Plan(
        starts=integers(2 * most + 2),
        lens=integers(2 * most + 1),
        table=integers(2 * most + 1, capacity),
        sources=integers(capacity),
        num_used=integers(1),
        absorbed_lens=integers(num_reqs),
    )
    block_table = batch.block_table
    launch(
        latent_plan_kernel,
        (num_reqs,),
        (
            batch.query_start_loc, batch.seq_lens, block_table, plan.absorbed_lens, plan.starts,
            plan.lens, plan.table, plan.sources, plan.num_used,
        ),
        (
            num_reqs, block_table.shape[1] * block_size, capacity, least, most,
            block_table.stride(0), plan.table.stride(0),
        ),
        BLOCK_SIZE=block_size,
        num_warps=4,
    )  # fmt: skip
    return plan


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
