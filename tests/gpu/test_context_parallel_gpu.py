"""Attention over each rank's part of the keys, and all of it, in bfloat16 on a real GPU.

The ranks of these tests are parts that one process computes one after the other, or loopback ranks.
The kernels for Hopper have no interpreter, so only these tests run them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paged_batches import (
    MIXES,
    Batch,
    Layout,
    Mix,
    assert_same_bits,
    build,
    check_replays,
    oracle,
    padded,
)
from part_batches import build_whole, check_parts, rows_of, run_ranks, stored_part

from ostinato import GraphPool
from ostinato.attention.base import AttentionMetadata
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton_paged import triton_part_attention
from ostinato.compat import runs_gluon
from ostinato.parallel.context.context_part import ContextPart
from ostinato.parallel.context.triton_context_parallel import TritonContextParallelAttention
from ostinato.parallel.distributed import DistributedComm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
STREAM, PREFILL, PAGED = "stream_decode", "prefill_attention", "paged_attention"
DECODE = Layout(
    requests=((1, 0), (1, 1), (1, 3000), (1, 62), (1, 700), (1, 127), (1, 5)),
    group=8,
    head_dim=128,
    value_dim=128,
    block_size=16,
    dtype=torch.bfloat16,
    padding_requests=3,
    padding_tokens=3,
)
MIXED = replace(
    DECODE, requests=((200, 0), (1, 900), (77, 33), (5, 400), (1, 0)), padding_tokens=20
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that ran."""
    found: set[str] = set()

    def count(name: str) -> None:
        module = import_module(f"ostinato.attention.triton.{name}")
        original = getattr(module, name)

        def counted(*args: Any, **options: Any) -> None:
            found.add(name)
            original(*args, **options)

        monkeypatch.setattr(module, name, counted)

    for name in (STREAM, PREFILL, PAGED):
        count(name)
    return found


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (4, 1), (3, 4)])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"soft_cap": 3.0},
        {"sinks": True},
        {"sinks": True, "soft_cap": 0.5},
        {"group": 16},
        {"group": 1, "num_kv_heads": 8},
        {"group": 3, "num_kv_heads": 2},
        {"head_dim": 64, "value_dim": 64},
        {"head_dim": 192, "value_dim": 128},
        {"group": 2, "head_dim": 256, "value_dim": 256},
        {"block_size": 64},
        {"requests": ((1, 0), (1, 1)), "padding_requests": 0, "padding_tokens": 0},
        {"requests": ((1, 3000), (1, 2), *(((1, 7), (1, 900)) * 70))},
    ],
    ids=[
        "plain",
        "float16",
        "cap",
        "sinks",
        "cap sinks",
        "group 16",
        "group 1",
        "group 3",
        "64 wide",
        "192 wide",
        "256 wide",
        "blocks of 64",
        "two",
        "many",
    ],
)
def test_decode_batches(ran: set[str], size: int, interleave: int, change: dict[str, Any]) -> None:
    check_parts(replace(DECODE, **change), size, interleave, CUDA)
    assert ran == ({STREAM} if runs_gluon(CUDA) else {PAGED})


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 16)])
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (MIXED, {STREAM, PREFILL}),
        (replace(MIXED, sinks=True, soft_cap=3.0), {STREAM, PREFILL}),
        (replace(MIXED, head_dim=192), {STREAM, PREFILL}),
        (replace(MIXED, group=2, head_dim=256, value_dim=256), {STREAM, PREFILL}),
        (replace(MIXED, block_size=64), {STREAM, PREFILL}),
        (replace(MIXED, requests=((2, 0), (1, 0), (3, 1), (40, 0), (1, 1))), {STREAM, PREFILL}),
        (replace(MIXED, window=100), {PREFILL}),
        (replace(MIXED, window=1), {PREFILL}),
        (replace(MIXED, window=33, sinks=True), {PREFILL}),
        (replace(MIXED, group=17), {PREFILL}),
        (replace(MIXED, requests=((1200, 70),), padding_requests=0), {PREFILL}),
        (replace(MIXED, requests=((20, 70),), padding_requests=0), {PAGED}),
        (replace(MIXED, head_dim=32, value_dim=32), {PAGED}),
        (replace(DECODE, window=100), {PAGED}),
        (replace(DECODE, window=1), {PAGED}),
        (replace(DECODE, group=17), {PAGED}),
        (replace(DECODE, head_dim=32, value_dim=32), {PAGED}),
    ],
    ids=[
        "mixed",
        "cap sinks",
        "192 wide",
        "256 wide",
        "blocks of 64",
        "short",
        "window",
        "window 1",
        "window sinks",
        "group 17",
        "long",
        "tail",
        "32 wide",
        "decode window",
        "decode window 1",
        "decode group 17",
        "decode 32 wide",
    ],
)
def test_other_batches(
    ran: set[str], size: int, interleave: int, layout: Layout, kernels: set[str]
) -> None:
    check_parts(layout, size, interleave, CUDA)
    assert ran == (kernels if runs_gluon(CUDA) else {PAGED})


@pytest.mark.parametrize("layout", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_loopback_ranks(layout: Layout, sinks: bool) -> None:
    """Kernels and copies of all ranks on one stream, as the backend launches them."""
    batch = build_whole(replace(layout, sinks=sinks), 4, CUDA)
    expected = oracle(batch)
    found, _ = run_ranks(
        TritonContextParallelAttention, batch, 4, 1, uniform_decode=layout is DECODE
    )
    tolerance = 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_replays_have_the_bits_of_eager_calls(size: int) -> None:
    """All parts of a decode batch and their combination in one graph, replayed with other lengths.

    Programs race for counters and memory: every replay counts from zero, and rows that have no key
    in a part are told so each time.
    """
    from ostinato.attention.triton.combine_ranks import combine_ranks

    def drawn(requests: Mix, seed: int) -> Batch:
        padding = 10 - len(requests)
        layout = replace(
            DECODE,
            block_size=16 * size,
            requests=requests,
            padding_requests=padding,
            padding_tokens=padding,
            seed=seed,
        )
        return build(layout, CUDA, min_blocks=192)

    lens = [DECODE.requests, ((1, 0),) * 4, ((1, 2500), (1, 2999)), DECODE.requests[::-1]]
    batches = [drawn(requests, seed) for seed, requests in enumerate(lens)]
    first = drawn(lens[0], 9)
    parts = [ContextPart(size, rank, 1) for rank in range(size)]
    static = [stored_part(first, part, uniform_decode=True) for part in parts]
    own_lens = [part.local_seq_lens(first.seq_lens) for part in parts]
    query = first.query

    def step() -> torch.Tensor:
        for rows, lengths, part in zip(static, own_lens, parts, strict=True):
            triton_part_attention(query, rows, lengths, part)
        out = query.new_empty((*query.shape[:2], DECODE.value_dim))
        combine_ranks(torch.stack([rows_of(rows) for rows in static]), starts, out)
        return out

    starts = static[0].query_start_loc
    step()  # kernels are compiled and loaded by a first call
    with GraphPool(CUDA, lazy_capture=True) as pool:
        captured = pool.capture(step)
        for batch in [*batches, *batches]:
            query.copy_(batch.query)
            for rows, lengths, part in zip(static, own_lens, parts, strict=True):
                new = stored_part(batch, part, uniform_decode=True)
                for at in (0, 1, 3, 4, 5):
                    target, source = rows[at], new[at]
                    assert isinstance(target, torch.Tensor)
                    assert isinstance(source, torch.Tensor)
                    target.copy_(source)
                rows_of(rows).fill_(math.nan)
                lengths.copy_(part.local_seq_lens(batch.seq_lens))
            pool.replay(captured.tape)
            replayed = captured.output.clone()
            tolerance = 2 * torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(
                replayed.cpu().double(), oracle(batch), rtol=tolerance, atol=tolerance
            )
            assert_same_bits(replayed, step())


@pytest.fixture
def world_of_one() -> Iterator[DistributedComm]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with DistributedComm((0,), CUDA) as comm:
            yield comm
    finally:
        dist.destroy_process_group()


class _OnePart(TritonContextParallelAttention):
    """For batches that know nothing of parts."""

    def _attend(self, query: torch.Tensor, batch: PagedBatch, metadata: AttentionMetadata) -> None:
        super()._attend(query, batch, replace(metadata, dcp_local_seq_lens=metadata.seq_lens))


def test_a_graph_contains_the_exchange(world_of_one: DistributedComm) -> None:
    """NCCL refuses two ranks on one GPU, so this is a group of one, whose collectives still run."""
    backend = _OnePart(world_of_one)
    rules: dict[str, Any] = {"group": 4, "head_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    spec = build(padded(MIXES[0], 12, 0, block_size=16, **rules)).spec()

    def eager(query: Any, key: Any, value: Any, *batch: Any) -> None:
        given = PagedBatch(*batch)
        metadata = AttentionMetadata(
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table,
            slot_mapping=given.slot_mapping,
            max_query_len=1,
            max_seq_len=given.max_seq_len,
            kv_caches=[(given.key_cache, given.value_cache)],
            backend=backend,
        )
        backend.forward(spec, query, key, value, metadata, given.out, given.sinks)

    with GraphPool(CUDA, lazy_capture=True) as pool:
        check_replays(pool, backend, eager, MIXES, 12, CUDA, block_size=16, **rules)
