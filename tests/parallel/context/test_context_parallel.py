"""Keys split over ranks by token: attention against torch's over all keys, on loopback ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.parallel.comm import NoComm
from ostinato.parallel.context.context_parallel import (
    ContextParallelAttention,
    PartBatch,
    attend_part,
    combine,
)
from ostinato.parallel.context.context_part import ContextPart
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import RankContext
from ostinato.runner import startup
from ostinato.testing.loopback import LoopbackWorld

SLOTS = 4  # of a block, on each rank
DIM, VALUE_DIM, HEADS = 8, 6, 3
QUERY_LENS, SEQ_LENS = (1, 5, 1, 7), (1, 5, 23, 30)  # the last two continue
PADDING = 3  # tokens, and a request


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_every_token_is_in_one_part(size: int, interleave: int) -> None:
    lengths = torch.arange(60)
    owner = [position // interleave % size for position in range(60)]
    block = SLOTS * size
    for rank in range(size):
        part = ContextPart(size, rank, interleave)
        expected = [owner[:length].count(rank) for length in range(60)]
        assert part.local_seq_lens(lengths).tolist() == expected
        own = [position for position in range(60) if owner[position] == rank]
        assert part.positions(torch.arange(len(own))).tolist() == own
        # Position p of a request in blocks 1, 2, ... has slot p + block of the whole cache.
        slots = part.local_slots(torch.tensor([-1, *range(block, block + 60)]), SLOTS).tolist()
        assert slots[0] == -1
        local = [slot for slot in slots if slot >= 0]
        assert local == list(range(SLOTS, SLOTS + len(own)))
        assert [p for p, slot in enumerate(slots[1:]) if slot >= 0] == own


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, sinks: Any
) -> torch.Tensor:
    """Attention of the last queries of one request over all its keys [keys, 1, dim]."""
    position = torch.arange(len(key))
    last = position[-len(query) :, None]
    hidden = position > last
    if spec.window is not None:
        hidden |= position <= last - spec.window
    if spec.soft_cap is None and sinks is None:
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
        return F.scaled_dot_product_attention(
            *heads, attn_mask=bias, scale=spec.scale, enable_gqa=True
        )[0].transpose(0, 1)
    scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key)]
    return torch.einsum("hqk,kd->qhd", weights, value[:, 0])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"soft_cap": 3.0}, {"sinks": True}, {"window": 6, "sinks": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_is_that_over_all_keys(size: int, interleave: int, options: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    spec = AttentionSpec(
        layer=0,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=DIM,
        value_dim=VALUE_DIM,
        scale=0.4,
        window=options.get("window"),
        soft_cap=options.get("soft_cap"),
    )
    sinks = draw(size * HEADS) if "sinks" in options else None
    block = SLOTS * size
    keys = [draw(length, 1, DIM) for length in SEQ_LENS]
    values = [draw(length, 1, VALUE_DIM) for length in SEQ_LENS]
    queries = [draw(count, size * HEADS, DIM) for count in QUERY_LENS]
    blocks, tables = 1, torch.zeros(len(SEQ_LENS) + 1, 32, dtype=torch.int32)
    for row, length in enumerate(SEQ_LENS):
        needed = -(-length // block)
        tables[row, :needed] = torch.arange(blocks, blocks + needed).flip(0)
        blocks += needed
    lens = torch.tensor([*QUERY_LENS, 0])
    starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()

    def slots_of(row: int, first: int, stop: int) -> torch.Tensor:
        position = torch.arange(first, stop)
        return tables[row, position // block].long() * block + position % block

    world = LoopbackWorld(size)

    def one_rank(rank: int) -> torch.Tensor:
        backend = ContextParallelAttention(world.comm(range(size), rank), interleave)
        caches = [torch.full((blocks, SLOTS, 1, dim), math.nan) for dim in (DIM, VALUE_DIM)]

        def run(pairs: list[tuple[int, int]], starts: torch.Tensor, pad: int) -> torch.Tensor:
            """The tokens from the first to the second position of each request."""
            slots = torch.cat([slots_of(row, *pair) for row, pair in enumerate(pairs)])
            seq_lens = torch.tensor([stop for _, stop in pairs] + [0]).int()
            metadata = AttentionMetadata(
                query_start_loc=starts,
                seq_lens=seq_lens,
                dcp_local_seq_lens=backend.part.local_seq_lens(seq_lens),
                block_table=tables,
                slot_mapping=backend.part.local_slots(F.pad(slots, (0, pad), value=-1), SLOTS),
                max_query_len=32,
                max_seq_len=64,
                kv_caches=[(caches[0], caches[1])],
                backend=backend,
            )

            def cut(tensors: list[torch.Tensor]) -> torch.Tensor:
                rows = [t[a:b] for t, (a, b) in zip(tensors, pairs, strict=True)]
                return torch.cat([*rows, torch.full((pad, *rows[0].shape[1:]), math.nan)])

            own = slice(rank * HEADS, (rank + 1) * HEADS)
            padded = [
                torch.cat([draws.new_zeros(length - len(draws), *draws.shape[1:]), draws])[:, own]
                for draws, length in zip(queries, SEQ_LENS, strict=True)
            ]
            query = cut(padded)
            out = torch.full((len(query), HEADS, VALUE_DIM), math.nan)
            own_sinks = None if sinks is None else sinks[own]
            backend.forward(spec, query, cut(keys), cut(values), metadata, out, own_sinks)
            return out

        before = [(0, n - q) for n, q in zip(SEQ_LENS, QUERY_LENS, strict=True)]
        earlier = torch.tensor([0, *(stop for _, stop in before), 0]).cumsum(0).int()
        run(before, earlier, 0)
        now = [(n - q, n) for n, q in zip(SEQ_LENS, QUERY_LENS, strict=True)]
        out = run(now, starts, PADDING)
        assert caches[0][0].isnan().all(), "padding was written"
        stored = sum(int((~cache.isnan()).any(-1).sum()) for cache in caches)
        part = ContextPart(size, rank, interleave)
        assert stored == 2 * int(part.local_seq_lens(torch.tensor(SEQ_LENS)).sum())
        return out

    found = torch.cat(world.run(one_rank), dim=1)
    expected = [dense(q, k, v, spec, sinks) for q, k, v in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(found[:-PADDING], torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert (found[-PADDING:] == 0).all()


def test_combining_parts_is_attention_over_all() -> None:
    scores, values = torch.randn(4, 7, 20), torch.randn(20, 3)
    hidden = torch.rand(7, 20) < 0.5
    hidden[0], hidden[1, :10] = True, True  # a row without keys; one without keys in a part
    scores = scores.masked_fill(hidden, -math.inf)
    expected = torch.nan_to_num(torch.softmax(scores, -1), 0.0) @ values
    outs, lses = [], []
    for keys in (slice(0, 10), slice(10, 13), slice(13, 20)):
        outs.append(torch.nan_to_num(torch.softmax(scores[..., keys], -1), 0.0) @ values[keys])
        lses.append(torch.logsumexp(scores[..., keys], -1))
    torch.testing.assert_close(combine(torch.stack(outs), torch.stack(lses)), expected)


def test_the_log_sum_exp_is_torchs() -> None:
    query, keys, values = torch.randn(5, 2, DIM), torch.randn(1, 8, 1, DIM), torch.randn(1, 8, 1, 6)
    batch = PartBatch(
        keys,
        values,
        torch.empty(5, 2, 6),
        torch.empty(5, 2),
        torch.tensor([0, 5]),
        torch.tensor([5]),
        torch.tensor([2]),
        torch.zeros(1, 1, dtype=torch.int32),
        None,
        0.5,
        None,
        None,
        8,
    )
    attend_part(query, batch, ContextPart(2, 1, 1))  # positions 1 and 3
    scores = torch.einsum("qhd,kd->qhk", query, keys[0, :2, 0]) * 0.5
    hidden = torch.tensor([1, 3]) > torch.arange(5)[:, None]
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    torch.testing.assert_close(batch.lse, torch.logsumexp(scores, -1))


@pytest.mark.parametrize(
    ("layout", "num_kv_heads", "message"),
    [
        ({"tp": 4, "dcp": 3}, 1, "must divide the tensor parallel size"),
        ({"tp": 2, "sp": 2, "dcp": 2}, 1, "sp must be 1, not 2"),
        ({"tp": 4, "dcp": 4}, 2, "with 2 KV heads on 4 ranks only 2 do; use a divisor of 2"),
        ({"tp": 4, "dcp": 2}, 4, "with 4 KV heads on 4 ranks only 1 do"),
    ],
)
def test_ranks_that_cannot_share_keys(layout: Any, num_kv_heads: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**layout).heads(8, num_kv_heads)


def test_swiftkv_models_are_refused() -> None:
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 32, "show_progress": False}
    config = EngineConfig("tiny", random_weights=True, swiftkv_layers=1, **options)
    context = RankContext(
        layout=ParallelLayout(tp=2, dcp=2),
        rank=0,
        device=torch.device("cpu"),
        comm_of=lambda ranks: NoComm(),
        everyone=NoComm(),
    )
    with pytest.raises(ConfigError, match="does not support SwiftKV models"):
        startup.build_runner(config, startup.load(config), context)


def test_groups_share_kv_heads() -> None:
    layout = ParallelLayout(tp=8, dcp=2)
    heads = layout.heads(8, 2)
    assert [layout.context_group(rank) for rank in (0, 1, 5)] == [(0, 1), (0, 1), (4, 5)]
    for rank in range(8):
        shared = [heads.kv_heads(each) for each in layout.context_group(rank)]
        assert shared[0] == shared[1]
