"""Paged attention in operators of fixed shape, which a CUDA graph can contain.

Nothing is read back to the host. All shapes follow from the shapes of the arguments and from the
limit on the sequence length, so the same work fits every batch of that size; what is missing is
masked. The batch is divided into tiles, keys are read a few blocks at a time, and the softmax is
updated in float32. Nothing here is specific to CUDA, and the tests run it on the CPU too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ostinato.attention.paged import PagedBatch

# At most this many queries in a tile, which reads its keys once for all of them.
_TILE_SIZE = 64
# At most this many keys at a time, in this much memory. They must not depend on the limit on the
# sequence length: sums would be grouped differently, so a higher limit would change the last bits.
_STEP_KEYS = 512
_STEP_BYTES = 256 << 20


class _Tiles(NamedTuple):
    """The batch as N tiles of ``size`` rows, each tile for queries of one request."""

    rows: torch.Tensor  # [T] each token's: tile * size + offset; N * size for those of no request
    positions: torch.Tensor  # [N, size] of each query in its sequence; -1 where there is no query
    first: torch.Tensor  # [N] first position that a query of the tile sees
    last: torch.Tensor  # [N] last one; -1 where there is no query
    block_table: torch.Tensor  # [N, blocks] of the tile's request


class _Keys(NamedTuple):
    """The same number of keys, C, for each tile."""

    positions: torch.Tensor  # [N, C] in the tile's sequence
    keys: torch.Tensor  # [N, num_kv_heads, head_dim, C]; anything where no query sees it
    values: torch.Tensor  # [N, num_kv_heads, C, value_dim]; 0 where no query sees it


class _Softmax(NamedTuple):
    """The softmax over the keys so far, for rows [N, num_kv_heads, group * size]."""

    highest: torch.Tensor  # [..., 1] score
    total: torch.Tensor  # [..., 1] sum of the weights; that of the highest score is 1
    values: torch.Tensor  # [..., value_dim] weighted sum


def paged_attention_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    key_cache, value_cache, out = batch[:3]
    window = batch.window
    store_kv_cuda(key, value, key_cache, value_cache, batch.slot_mapping)
    num_tokens, num_reqs = query.shape[0], batch.seq_lens.shape[0]
    if num_tokens == 0 or num_reqs == 0:
        out.zero_()
        return
    block_size, num_kv_heads = key_cache.shape[1:3]
    size = _tile_size(num_tokens, num_reqs)
    # Only dummy batches of a capture claim more keys than the table has room for.
    seq_lens = batch.seq_lens.clamp(max=batch.block_table.shape[1] * block_size)
    tiles = _tile(num_tokens, size, batch._replace(seq_lens=seq_lens))
    q = _into_tiles(query, tiles, num_kv_heads)
    softmax = _begin(q, batch.sinks, value_cache.shape[3])

    num_keys = batch.max_seq_len
    if window is not None:  # what one tile sees, and what precedes it in the first block
        num_keys = min(num_keys, window + size - 1 + block_size - 1)
    step = _blocks_per_step(q, key_cache, value_cache)
    for block in range(0, -(-num_keys // block_size), step):
        keys = _read(tiles, key_cache, value_cache, block, step)
        scores = _scores(q, keys.keys, batch.scale, batch.soft_cap)
        hidden = _hidden(tiles.positions, keys.positions, window)
        scores.unflatten(2, (-1, size)).masked_fill_(hidden[:, None, None], -torch.inf)
        softmax = _advance(softmax, scores, keys.values)
    out.copy_(_out_of_tiles(softmax.values / softmax.total, tiles))


def store_kv_cuda(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's row in its slot; padding writes to slot 0 what is there already."""
    _store(key, key_cache, slot_mapping)
    _store(value, value_cache, slot_mapping)


def _store(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = cache.view(-1, *cache.shape[2:])
    padding = (slot_mapping < 0)[:, None, None]
    rows = torch.where(padding, slots[:1], rows)
    slots.index_copy_(0, slot_mapping.clamp(min=0), rows)


def _tile_size(num_tokens: int, num_reqs: int) -> int:
    """About the queries of an average request, since only queries of one request share keys."""
    average = -(-num_tokens // num_reqs)
    return min(_TILE_SIZE, 1 << (average - 1).bit_length())


def _tile(num_tokens: int, size: int, batch: PagedBatch) -> _Tiles:
    query_start_loc, seq_lens, window = batch.query_start_loc, batch.seq_lens, batch.window
    num_reqs = seq_lens.shape[0]
    device = query_start_loc.device
    # The last tile of each request may be partly filled.
    num_tiles = (num_tokens + num_reqs * (size - 1)) // size
    starts, query_lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    tiles_of = (query_lens + size - 1) // size
    first_tiles = tiles_of.cumsum(0) - tiles_of

    token = torch.arange(num_tokens, device=device, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc, token, right=True) - 1
    owned = (request >= 0) & (request < num_reqs)
    request = request.clamp(0, num_reqs - 1)
    offset = token - starts[request]
    position = seq_lens[request] - query_lens[request] + offset
    owned &= position >= 0
    tile = torch.where(owned, first_tiles[request] + offset // size, num_tiles)
    rows = torch.where(owned, tile * size + offset % size, num_tiles * size)

    # One extra tile takes the tokens of no request; it is dropped again.
    positions = torch.full(((num_tiles + 1) * size,), -1, device=device, dtype=torch.long)
    positions.index_copy_(0, rows, torch.where(owned, position, -1))
    positions = positions.view(-1, size)[:-1]
    requests = torch.zeros(num_tiles + 1, device=device, dtype=torch.long)
    requests.index_copy_(0, tile, request)
    last = positions.amax(1)
    first = torch.zeros_like(last)
    if window is not None:
        earliest = torch.where(positions < 0, last[:, None], positions).amin(1)
        first = (earliest - window + 1).clamp(min=0)
    return _Tiles(rows, positions, first, last, batch.block_table[requests[:-1]])


def _into_tiles(query: torch.Tensor, tiles: _Tiles, num_kv_heads: int) -> torch.Tensor:
    """[T, num_heads, head_dim] -> [N, num_kv_heads, group * size, head_dim] in float32."""
    num_tiles, size = tiles.positions.shape
    tiled = query.new_zeros((num_tiles * size + 1, *query.shape[1:]), dtype=torch.float32)
    tiled.index_copy_(0, tiles.rows, query.float())
    by_head = tiled[:-1].view(num_tiles, size, num_kv_heads, -1, query.shape[2])
    return by_head.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _out_of_tiles(rows: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """[N, num_kv_heads, group * size, value_dim] -> [T, num_heads, value_dim]."""
    num_tiles, size = tiles.positions.shape
    by_token = rows.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    owned = tiles.rows < num_tiles * size
    found = by_token[tiles.rows.clamp(max=num_tiles * size - 1)]
    return torch.where(owned[:, None, None], found, 0.0)


def _blocks_per_step(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    num_tiles, num_kv_heads, num_rows, head_dim = q.shape
    _, block_size, _, value_dim = value_cache.shape
    # Per key: as read from the cache, in float32, and transposed; scores three times.
    elements = (head_dim + value_dim) * (8 + key_cache.itemsize) + num_rows * 12
    num_keys = min(_STEP_KEYS, _STEP_BYTES // (num_tiles * num_kv_heads * elements))
    return max(1, num_keys // block_size)


def _read(
    tiles: _Tiles, key_cache: torch.Tensor, value_cache: torch.Tensor, block: int, count: int
) -> _Keys:
    """``count`` blocks for each tile, the first of them ``block`` blocks after its first."""
    block_size = key_cache.shape[1]
    device = key_cache.device
    numbers = torch.arange(block, block + count, device=device) + tiles.first[:, None] // block_size
    # Entries of the table that no query needs may hold anything; block 0 is always there.
    entries = tiles.block_table.gather(1, numbers.clamp(max=tiles.block_table.shape[1] - 1))
    blocks = torch.where(numbers * block_size <= tiles.last[:, None], entries, 0).long()
    positions = numbers[:, :, None] * block_size + torch.arange(block_size, device=device)
    positions = positions.flatten(1)
    unseen = (positions < tiles.first[:, None]) | (positions > tiles.last[:, None])
    keys = key_cache[blocks].flatten(1, 2).permute(0, 2, 3, 1).float()
    values = value_cache[blocks].flatten(1, 2).transpose(1, 2).float()
    # A weight of 0 would not mask a NaN.
    return _Keys(positions, keys, values.masked_fill(unseen[:, None, :, None], 0.0))


def _scores(
    q: torch.Tensor, keys: torch.Tensor, scale: float, soft_cap: float | None
) -> torch.Tensor:
    scores = (q @ keys).mul_(scale)
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _hidden(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """By positions: which keys [N, C] each query [N, size] does not see; [N, size, C]."""
    distance = queries[:, :, None] - keys[:, None, :]
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def _begin(q: torch.Tensor, sinks: torch.Tensor | None, value_dim: int) -> _Softmax:
    """The softmax over the sinks alone, which have a weight but no value."""
    values = q.new_zeros((*q.shape[:3], value_dim))
    if sinks is None:
        # Lowest but finite: -inf minus -inf would be NaN.
        highest = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        return _Softmax(highest, torch.zeros_like(highest), values)
    by_head = sinks.float().view(1, q.shape[1], -1, 1, 1)
    size = q.shape[2] // by_head.shape[2]
    highest = by_head.expand(q.shape[0], -1, -1, size, -1).flatten(2, 3)
    return _Softmax(highest, torch.ones_like(highest), values)


def _advance(softmax: _Softmax, scores: torch.Tensor, values: torch.Tensor) -> _Softmax:
    """Add keys. Those that a row does not see (score -inf) do not change its bits."""
    highest = torch.maximum(softmax.highest, scores.amax(-1, keepdim=True))
    faded = torch.exp(softmax.highest - highest)
    weights = torch.exp(scores - highest)
    total = softmax.total * faded + weights.sum(-1, keepdim=True)
    return _Softmax(highest, total, softmax.values * faded + weights @ values)
