"""Paged attention on the CPU: request by request, over the keys that are really there.

The body of the operator reads the lengths each time it runs, also when a graph replays it, so its
cost follows the lengths and not the limits. It touches no cache slot that a request cannot see, so
what lies in the others (padding, stale blocks) cannot matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

# Queries that attend together where they need a mask: bounds the mask and the scores.
_QUERY_ROWS = 256


class _Rules(NamedTuple):
    """What is fixed about the computation, for all requests of a call."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None


class _Queries(NamedTuple):
    """The queries of one request: ``query_len`` rows of the batch from ``start`` on.

    The last of them stands at the last of the request's ``seq_len`` keys.
    """

    request: int
    start: int
    query_len: int
    seq_len: int


class _Rows(NamedTuple):
    """Keys or values of one request: ``tokens`` [N, num_kv_heads, dim], position 0 at ``origin``.

    ``origin`` is negative where the first positions were left out.
    """

    tokens: torch.Tensor
    origin: int

    def between(self, first: int, last: int, group: int) -> torch.Tensor:
        """Positions from ``first`` to before ``last``: a view [num_kv_heads, group, ..., dim]."""
        tokens = self.tokens
        per_token, per_head, per_element = tokens.stride()
        # One call where slicing and transposing would be four; this is most of a short request.
        return tokens.as_strided(
            (tokens.shape[1], group, last - first, tokens.shape[2]),
            (per_head, 0, per_token, per_element),
            tokens.storage_offset() + (self.origin + first) * per_token,
        )


def paged_attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_seq_len: int,
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    block_size = key_cache.shape[1]
    keys = key_cache.view(-1, *key_cache.shape[2:])
    values = value_cache.view(-1, *value_cache.shape[2:])
    _store(key, value, keys, values, slot_mapping)

    capacity = block_table.shape[1] * block_size
    batch = _queries_of(query_start_loc.tolist(), seq_lens.tolist(), capacity)
    if sum(queries.query_len for queries in batch) < out.shape[0]:
        out.zero_()  # rows that belong to no request
    if not batch:
        return
    rules = _Rules(scale, window, soft_cap, sinks)
    num_blocks = -(-max(queries.seq_len for queries in batch) // block_size)
    tables: list[list[int]] = block_table[: batch[-1].request + 1, :num_blocks].tolist()
    for queries in batch:
        first = _first_visible(queries.seq_len - queries.query_len, window) // block_size
        last = -(-queries.seq_len // block_size)
        blocks = tables[queries.request][first:last]
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            origin = (blocks[0] - first) * block_size
            request_keys, request_values = _Rows(keys, origin), _Rows(values, origin)
        else:
            index = block_table[queries.request, first:last]
            origin = -first * block_size
            request_keys = _Rows(key_cache.index_select(0, index).flatten(0, 1), origin)
            request_values = _Rows(value_cache.index_select(0, index).flatten(0, 1), origin)
        _attend(queries, query, request_keys, request_values, out, rules)


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if min(slot_mapping.tolist(), default=0) < 0:
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)


def _queries_of(starts: list[int], seq_lens: list[int], capacity: int) -> list[_Queries]:
    """The requests that have something to compute.

    A batch made up for a capture may claim more keys than a block table can hold: it gets those
    that fit, and queries that stand before the first key get none.
    """
    batch = []
    for request, seq_len in enumerate(seq_lens):
        seq_len = min(seq_len, capacity)
        end = starts[request + 1]
        query_len = min(end - starts[request], seq_len)
        if query_len > 0:
            batch.append(_Queries(request, end - query_len, query_len, seq_len))
    return batch


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _attend(
    queries: _Queries,
    query: torch.Tensor,
    keys: _Rows,
    values: _Rows,
    out: torch.Tensor,
    rules: _Rules,
) -> None:
    """The attention of one request, some rows at a time."""
    num_kv_heads = keys.tokens.shape[1]
    context = queries.seq_len - queries.query_len
    plain = rules.soft_cap is None and rules.sinks is None
    # torch knows one mask by name: as many keys as queries, each sees those up to its own.
    square = context == 0 and (rules.window is None or rules.window >= queries.seq_len)
    causal = plain and square and queries.query_len > 1
    step = queries.query_len if causal else _QUERY_ROWS
    for row in range(0, queries.query_len, step):
        count = min(step, queries.query_len - row)
        start, position = queries.start + row, context + row
        first, end = _first_visible(position, rules.window), position + count
        q = _by_kv_head(query, start, count, num_kv_heads)
        k, v = keys.between(first, end, q.shape[1]), values.between(first, end, q.shape[1])
        mask = None
        if count > 1 and not causal:
            mask = _visible(count, end - first, position - first, rules.window)
        if plain:
            result = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=rules.scale
            )
        else:
            result = _attend_by_hand(q, k, v, mask, rules)
        _by_kv_head(out, start, count, num_kv_heads).copy_(result)


def _by_kv_head(tokens: torch.Tensor, start: int, count: int, num_kv_heads: int) -> torch.Tensor:
    """``count`` rows of [T, num_heads, dim], as a view [num_kv_heads, group, count, dim].

    For one row it is [num_kv_heads, 1, group, dim]: the heads of a group see the same keys, so one
    key head can serve them as so many queries.
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
    """Which keys each query sees, where the first query stands at key ``position``."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(position)
    return mask if window is None else mask.triu_(position - window + 1)


def _attend_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rules: _Rules
) -> torch.Tensor:
    """What torch's fused attention has no room for: soft caps and sinks."""
    scores = q.flatten(1, 2).float() @ k[:, 0].float().transpose(1, 2)
    scores *= rules.scale
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    if mask is not None:
        scores.view(*q.shape[:3], -1).masked_fill_(~mask, -torch.inf)
    if rules.sinks is None:
        weights = scores.softmax(-1)
    else:
        num_kv_heads, num_rows, _ = scores.shape
        sinks = rules.sinks.float().view(num_kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(num_rows // sinks.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v[:, 0].float()).view(*q.shape[:3], -1)
