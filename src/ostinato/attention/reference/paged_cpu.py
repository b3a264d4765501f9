"""Paged attention on the CPU: request by request, over its actual keys.

The body of the operator reads the lengths each time it runs, even when a graph replays it, so its
cost follows the lengths and not the limits. It touches no cache slot that a request cannot see, so
what is in the others (padding, stale blocks) cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ostinato.attention.paged import PagedBatch

# Queries that attend together if they need a mask: bounds the mask and the scores.
_QUERY_ROWS = 256


class Queries(NamedTuple):
    """The queries of one request: ``query_len`` rows of the batch from ``start`` on.

    The last query is at the position of the last of the request's ``seq_len`` keys. Position 0 of
    the request is at row ``origin`` of the cache or, if its blocks are not consecutive, of the
    gathered ``blocks``; ``origin`` is negative if the first positions were left out.
    """

    start: int
    query_len: int
    seq_len: int
    origin: int
    blocks: torch.Tensor | None

    def num_visible(self, window: int | None) -> int:
        """Keys that the last query sees."""
        return self.seq_len - _first_visible(self.seq_len - 1, window)


class Layout(NamedTuple):
    """A batch's lengths, tables and slots. ``written``: the tokens to store; None: all."""

    queries: tuple[Queries, ...]
    written: torch.Tensor | None
    has_padding: bool


def paged_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    layout = read_layout(batch)
    _store(key, value, batch.key_cache, batch.value_cache, batch.slot_mapping, layout.written)
    if layout.has_padding:
        batch.out.zero_()  # rows that belong to no request
    attend_requests(layout.queries, query, batch)


def store_kv_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the rows that have a slot; touch no others."""
    has_slot = slot_mapping >= 0
    written = None if has_slot.all() else has_slot
    _store(key, value, key_cache, value_cache, slot_mapping, written)


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    written: torch.Tensor | None,
) -> None:
    if written is not None:
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def attend_requests(requests: Iterable[Queries], query: torch.Tensor, batch: PagedBatch) -> None:
    """Write the rows of ``requests`` in ``batch.out``. Their keys and values are in the cache."""
    key_cache, value_cache = batch.key_cache, batch.value_cache
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    is_plain = batch.is_plain
    for queries in requests:
        its_keys, its_values = keys, values
        if queries.blocks is not None:
            its_keys = key_cache.index_select(0, queries.blocks).flatten(0, 1)
            its_values = value_cache.index_select(0, queries.blocks).flatten(0, 1)
        if queries.query_len == 1 and is_plain:
            _attend_one(queries, query, its_keys, its_values, batch)
        else:
            _attend(queries, query, its_keys, its_values, batch)


def read_layout(batch: PagedBatch) -> Layout:
    """The batch's lengths, tables and slots as they are now."""
    block_size = batch.key_cache.shape[1]
    seq_lens, block_table = batch.seq_lens, batch.block_table
    needed = -(-max(seq_lens.tolist(), default=0) // block_size)
    # All layers of a step have the same integers: they are interpreted once, then compared.
    return _layout(
        batch.query_start_loc.numpy().tobytes(),
        seq_lens.numpy().tobytes(),
        block_table.numpy()[:, :needed].tobytes(),
        batch.slot_mapping.numpy().tobytes(),
        block_table.shape[1] * block_size,
        block_size,
        batch.window,
    )


@lru_cache(maxsize=4)  # one per window in use
def _layout(
    query_start_loc: bytes,
    seq_lens: bytes,
    block_table: bytes,
    slot_mapping: bytes,
    capacity: int,
    block_size: int,
    window: int | None,
) -> Layout:
    """The requests that have something to compute.

    The dummy batch of a capture may claim more keys than a block table can hold: it gets those that
    fit, and queries before the first key get none.
    """
    starts = np.frombuffer(query_start_loc, np.int32).tolist()
    lens = np.frombuffer(seq_lens, np.int32).tolist()
    slots = np.frombuffer(slot_mapping, np.int64)
    tables = np.frombuffer(block_table, np.int32).reshape(len(lens), -1 if lens else 0)
    queries = []
    for request, length in enumerate(lens):
        seq_len, end = min(length, capacity), starts[request + 1]
        query_len = min(end - starts[request], seq_len)
        if query_len > 0:
            first = _first_visible(seq_len - query_len, window) // block_size
            blocks = tables[request][first : -(-seq_len // block_size)]
            consecutive = bool((np.diff(blocks) == 1).all())
            origin = ((int(blocks[0]) if consecutive else 0) - first) * block_size
            index = None if consecutive else torch.from_numpy(blocks.copy())
            queries.append(Queries(end - query_len, query_len, seq_len, origin, index))
    is_written = slots >= 0
    return Layout(
        queries=tuple(queries),
        written=None if is_written.all() else torch.from_numpy(is_written.nonzero()[0]),
        has_padding=sum(each.query_len for each in queries) < len(slots),
    )


def _between(tokens: torch.Tensor, origin: int, first: int, last: int, group: int) -> torch.Tensor:
    """Positions from ``first`` to before ``last`` of a request whose position 0 is at ``origin`` of
    ``tokens`` [N, num_kv_heads, dim]: a view [num_kv_heads, group, last - first, dim]."""
    per_token, per_head, per_element = tokens.stride()
    # One call instead of four to slice and transpose; calls are most of a short request's time.
    return tokens.as_strided(
        (tokens.shape[1], group, last - first, tokens.shape[2]),
        (per_head, 0, per_token, per_element),
        tokens.storage_offset() + (origin + first) * per_token,
    )


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _attend_one(
    queries: Queries,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """One query: two matmuls and a softmax take less time than torch's fused attention.

    Since the last call the model's weights have passed through the CPU caches, so what counts is
    the number of calls, not how much they compute: a view is one call, the scale is part of the
    first matmul, and the second writes straight to the result.
    """
    num_kv_heads, dim = keys.shape[1:]
    first = _first_visible(queries.seq_len - 1, batch.window)
    seen, origin = queries.seq_len - first, queries.origin + first
    per_token, per_head, per_element = keys.stride()
    transposed_keys = keys.as_strided(
        (num_kv_heads, dim, seen),
        (per_head, per_element, per_token),
        keys.storage_offset() + origin * per_token,
    )
    per_token, per_head, per_element = values.stride()
    its_values = values.as_strided(
        (num_kv_heads, seen, values.shape[2]),
        (per_head, per_token, per_element),
        values.storage_offset() + origin * per_token,
    )
    query = _heads_of_one(query, queries.start, num_kv_heads)
    target = _heads_of_one(batch.out, queries.start, num_kv_heads)
    # baddbmm is bmm with a factor; with beta=0 it ignores its first argument.
    scores = torch.baddbmm(_nothing(query.dtype), query, transposed_keys, beta=0, alpha=batch.scale)
    weights = scores.softmax(-1, dtype=torch.float32)
    if its_values.dtype is not torch.float32:
        weights = weights.to(its_values.dtype)
    torch.bmm(weights, its_values, out=target)


def _heads_of_one(tokens: torch.Tensor, start: int, num_kv_heads: int) -> torch.Tensor:
    """One row of [T, num_heads, dim], as a view [num_kv_heads, group, dim].

    The heads of a group see the same keys, so they are queries of one key head.
    """
    _, num_heads, dim = tokens.shape
    per_token, per_head, per_element = tokens.stride()
    group = num_heads // num_kv_heads
    return tokens.as_strided(
        (num_kv_heads, group, dim),
        (group * per_head, per_head, per_element),
        tokens.storage_offset() + start * per_token,
    )


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 1, 1, dtype=dtype)


def _attend(
    queries: Queries,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """The attention of one request, some rows at a time."""
    num_kv_heads = keys.shape[1]
    context = queries.seq_len - queries.query_len
    plain = batch.is_plain
    # torch's is_causal is for as many keys as queries, each of which sees the keys up to its own.
    square = context == 0 and (batch.window is None or batch.window >= queries.seq_len)
    causal = plain and square and queries.query_len > 1
    step = queries.query_len if causal else _QUERY_ROWS
    for row in range(0, queries.query_len, step):
        count = min(step, queries.query_len - row)
        start, position = queries.start + row, context + row
        first, end = _first_visible(position, batch.window), position + count
        q = _by_kv_head(query, start, count, num_kv_heads)
        k = _between(keys, queries.origin, first, end, q.shape[1])
        v = _between(values, queries.origin, first, end, q.shape[1])
        mask = None
        if count > 1 and not causal:
            mask = _visible(count, end - first, position - first, batch.window)
        if plain:
            result = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=batch.scale
            )
        else:
            result = _attend_by_hand(q, k, v, mask, batch)
        _by_kv_head(batch.out, start, count, num_kv_heads).copy_(result)


def _by_kv_head(tokens: torch.Tensor, start: int, count: int, num_kv_heads: int) -> torch.Tensor:
    """``count`` rows of [T, num_heads, dim], as a view [num_kv_heads, group, count, dim].

    For one row it is [num_kv_heads, 1, group, dim]: the heads of a group see the same keys, so
    they are queries of one key head.
    """
    _, num_heads, dim = tokens.shape
    per_token, per_head, per_element = tokens.stride()
    group = num_heads // num_kv_heads
    if count == 1:
        shape, stride = (num_kv_heads, 1, group, dim), (group * per_head, 0, per_head, per_element)
    else:
        shape = (num_kv_heads, group, count, dim)
        stride = (group * per_head, per_head, per_token, per_element)
    return tokens.as_strided(shape, stride, tokens.storage_offset() + start * per_token)


def _visible(num_queries: int, num_keys: int, position: int, window: int | None) -> torch.Tensor:
    """Which keys each query sees, if the first query is at key ``position``."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(position)
    return mask if window is None else mask.triu_(position - window + 1)


def _attend_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, batch: PagedBatch
) -> torch.Tensor:
    """Soft caps and sinks, which torch's fused attention does not have."""
    scores = q.flatten(1, 2).float() @ k[:, 0].float().transpose(1, 2)
    scores *= batch.scale
    if batch.soft_cap is not None:
        scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
    if mask is not None:
        scores.view(*q.shape[:3], -1).masked_fill_(~mask, -torch.inf)
    if batch.sinks is None:
        weights = scores.softmax(-1)
    else:
        num_kv_heads, num_rows, _ = scores.shape
        sinks = batch.sinks.float().view(num_kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(num_rows // sinks.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v[:, 0].float()).view(*q.shape[:3], -1)
