# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Which requests of a batch ``latent_expand`` gives keys and values of every head, and where.

Decided on the device from the lengths, so a graph serves every batch of its size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ostinato.attention.paged import PagedBatch
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


class ExpansionPlan(NamedTuple):
    """Tensors that ``latent_plan_kernel`` writes."""

    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    sources: torch.Tensor
    num_used: torch.Tensor
    absorbed_lens: torch.Tensor


def plan_expansion(batch: PagedBatch, capacity: int, least: int, most: int) -> ExpansionPlan:
    """Which requests are expanded, if they have ``least`` queries or more, and where.

    ``capacity``: blocks that there are. ``most``: requests that can have this many.
    """
    num_reqs, block_size = batch.seq_lens.shape[0], batch.key_cache.shape[1]

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=batch.out.device, dtype=torch.int32)

    plan = ExpansionPlan(
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
