"""A batch's cache as several ranks store it, and attention over one rank's keys in float64.

Whatever a rank must not see is NaN, as in ``paged_batches``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from paged_batches import Batch, Layout, build, expected_caches, oracle
from torch import Tensor

from ostinato.attention.paged import PagedBatch
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton_paged import triton_part_attention
from ostinato.parallel.context.context_parallel import ContextParallelAttention, combine
from ostinato.parallel.context.context_part import ContextPart
from ostinato.testing.loopback import LoopbackWorld


def build_whole(layout: Layout, size: int, device: torch.device) -> Batch:
    """The batch of all ranks together; ``layout.block_size`` is that of each."""
    whole = replace(layout, block_size=layout.block_size * size)
    return build(whole, device, min_blocks=4)


def own_slots(cache: Tensor, part: ContextPart) -> Tensor:
    """A part's slots of the cache of the whole."""
    num_blocks, block_size, *row = cache.shape
    slots = block_size // part.size
    local = part.local_slots(torch.arange(num_blocks * block_size, device=cache.device), slots)
    own = cache.new_full((num_blocks, slots, *row), math.nan)
    own.flatten(0, 1)[local[local >= 0]] = cache.flatten(0, 1)[local >= 0]
    return own


def stored_part(batch: Batch, part: ContextPart, *, uniform_decode: bool = False) -> PagedBatch:
    """What a rank attends over once its keys are stored; ``out`` has room for the log-sum-exp."""
    keys, values = (own_slots(cache, part) for cache in expected_caches(batch))
    num_tokens, num_heads, _ = batch.query.shape
    shape = (num_heads, num_tokens, batch.layout.value_dim + 1)
    found = torch.full(shape, math.nan, device=batch.query.device)
    return PagedBatch(
        keys,
        values,
        found.transpose(0, 1)[..., :-1],
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.slot_mapping,
        batch.sinks if part.rank == 0 else None,
        batch.scale,
        batch.layout.window,
        batch.layout.soft_cap,
        batch.max_seq_len,
        uniform_decode,
    )


def rows_of(rows: PagedBatch) -> Tensor:
    """[heads, T, value_dim + 1]: the values of each row, with the log-sum-exp behind them."""
    heads_first = rows.out.transpose(0, 1)
    shape = (*heads_first.shape[:2], heads_first.shape[2] + 1)
    return heads_first.as_strided(shape, heads_first.stride())


def part_oracle(batch: Batch, part: ContextPart) -> Tensor:
    """The same in float64, by ``torch.logsumexp``; 0 and -inf where a query sees no key."""
    layout = batch.layout
    query = batch.query.cpu().double()
    out = torch.zeros(query.shape[1], query.shape[0], layout.value_dim + 1, dtype=torch.float64)
    out[..., -1] = -math.inf
    token = 0
    for (query_len, context), (keys, values) in zip(layout.requests, batch.dense, strict=False):
        for position in range(context, context + query_len):
            first = 0 if layout.window is None else max(0, position - layout.window + 1)
            seen = [
                p
                for p in range(first, position + 1)
                if p // part.interleave % part.size == part.rank
            ]
            k = keys[seen].double().repeat_interleave(layout.group, 1)
            v = values[seen].double().repeat_interleave(layout.group, 1)
            scores = torch.einsum("hd,khd->hk", query[token], k) * batch.scale
            if layout.soft_cap is not None:
                scores = layout.soft_cap * torch.tanh(scores / layout.soft_cap)
            every = scores
            if batch.sinks is not None and part.rank == 0:
                every = torch.cat([scores, batch.sinks.cpu().double()[:, None]], 1)
            lse = torch.logsumexp(every, 1) if every.shape[1] else out[:, token, -1]
            out[:, token, -1] = lse
            if seen:
                weights = torch.exp(scores - lse[:, None])
                out[:, token, :-1] = torch.einsum("hk,khd->hd", weights, v)
            token += 1
    return out


def check_parts(layout: Layout, size: int, interleave: int, device: torch.device) -> None:
    """Every part, its log-sum-exp, and all parts together by torch and by the kernel."""
    from ostinato.attention.triton.combine_ranks import combine_ranks

    batch = build_whole(layout, size, device)
    uniform = all(query_len == 1 for query_len, _ in layout.requests)
    uniform &= layout.padding_requests == layout.padding_tokens
    num_real = sum(query_len for query_len, _ in layout.requests)
    tolerance = 1e-5 if layout.dtype is torch.float32 else 2 * torch.finfo(layout.dtype).eps
    parts = []
    for rank in range(size):
        part = ContextPart(size, rank, interleave)
        rows = stored_part(batch, part, uniform_decode=uniform)
        triton_part_attention(batch.query, rows, part.local_seq_lens(batch.seq_lens), part)
        found = rows_of(rows)
        expected = part_oracle(batch, part)[:, :num_real]
        actual = found[:, :num_real].cpu().double()
        sees = expected[..., -1] > -math.inf
        assert torch.equal(actual[..., -1] > -math.inf, sees)
        torch.testing.assert_close(
            actual[sees], expected[sees], rtol=tolerance, atol=tolerance, check_stride=False
        )
        parts.append(found)
    together = torch.stack(parts)
    out = torch.full((*batch.query.shape[:2], layout.value_dim), math.nan, device=device)
    out = out.to(layout.dtype)
    combine_ranks(together, batch.query_start_loc, out)
    expected = oracle(batch)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    # torch's weighs with 0, which would not help against what was not written.
    outs, lses = together[:, :, :num_real, :-1], together[:, :, :num_real, -1]
    outs = outs.masked_fill((lses == -math.inf)[..., None], 0.0)
    reference = combine(outs, lses).transpose(0, 1).cpu().double()
    torch.testing.assert_close(reference, expected[:num_real], rtol=tolerance, atol=tolerance)


def run_ranks(
    kind: type[ContextParallelAttention],
    batch: Batch,
    size: int,
    interleave: int,
    *,
    uniform_decode: bool = False,
    qkv: Tensor | None = None,
    rotary: RotaryEmbedding | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The result of all loopback ranks' heads, and their caches afterwards.

    With ``qkv`` [ranks, T, width], RoPE is left to the backend.
    """
    world = LoopbackWorld(size)
    num_heads = batch.query.shape[1] // size
    spec = replace(batch.spec(), num_heads=num_heads)

    def one_rank(rank: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        backend = kind(world.comm(range(size), rank), interleave)
        part = backend.part
        caches = own_slots(batch.key_cache, part), own_slots(batch.value_cache, part)
        metadata = replace(
            batch.metadata(),
            kv_caches=[caches],
            slot_mapping=part.local_slots(batch.slot_mapping, caches[0].shape[1]),
            dcp_local_seq_lens=part.local_seq_lens(batch.seq_lens),
            backend=backend,
            uniform_decode=uniform_decode,
        )
        own = slice(rank * num_heads, (rank + 1) * num_heads)
        sinks = None if batch.sinks is None else batch.sinks[own]
        query = batch.query[:, own]
        out = query.new_full((*query.shape[:2], spec.value_dim), math.nan)
        if qkv is None:
            backend.forward(spec, query, batch.key, batch.value, metadata, out, sinks)
        else:
            assert rotary is not None
            assert positions is not None
            backend.forward_qkv(spec, qkv[rank], rotary, positions, metadata, out, sinks)
        return out, caches

    outs, caches = zip(*world.run(one_rank), strict=True)
    return torch.cat(outs, dim=1), list(caches)
