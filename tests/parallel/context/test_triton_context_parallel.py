"""The Triton backend of ranks that share keys: loopback ranks against a dense softmax in float64.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_batches import NOWHERE, Layout, assert_same_bits, expected_caches, oracle
from part_batches import build_whole, own_slots, run_ranks

from ostinato.attention.rope import RotaryEmbedding
from ostinato.config import EngineConfig
from ostinato.parallel.comm import NoComm
from ostinato.parallel.context.context_parallel import ContextParallelAttention
from ostinato.parallel.context.context_part import ContextPart
from ostinato.parallel.context.triton_context_parallel import TritonContextParallelAttention
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import RankContext
from ostinato.runner import startup
from ostinato.runner.startup import build

pytest.importorskip("triton")

MIXED = Layout(
    requests=((1, 0), (7, 0), (1, 40), (3, 17)), padding_requests=2, padding_tokens=3, group=4
)
DECODE = replace(MIXED, requests=((1, 0), (1, 40), (1, 2)), padding_tokens=2)


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "interleave", "rules"),
    [
        (1, 1, {}),
        (2, 1, {"soft_cap": 3.0}),
        (2, 2, {"window": 6}),
        (4, 4, {"sinks": True}),
        (4, 1, {"window": 6, "sinks": True}),
    ],
)
@pytest.mark.parametrize("layout", [MIXED, DECODE], ids=["mixed", "decode"])
def test_attention_is_that_over_all_keys(
    device: torch.device, layout: Layout, size: int, interleave: int, rules: dict[str, Any]
) -> None:
    batch = build_whole(replace(layout, **rules), size, device)
    expected, stored = oracle(batch), expected_caches(batch)
    found, caches = run_ranks(
        TritonContextParallelAttention, batch, size, interleave, uniform_decode=layout is DECODE
    )
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    for rank, pair in enumerate(caches):
        for cache, whole in zip(pair, stored, strict=True):
            assert_same_bits(cache, own_slots(whole, ContextPart(size, rank, interleave)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_is_that_of_the_reference(device: torch.device, layout: Layout, norm: bool) -> None:
    size, dim = 2, layout.head_dim
    torch.manual_seed(0)
    batch = build_whole(layout, size, device)
    batch.block_table %= NOWHERE  # the reference reads blocks before it masks their keys
    num_tokens, num_heads = batch.query.shape[0], batch.query.shape[1] // size
    # Ranks have queries of their own, and the same keys and values.
    queries = torch.randn(size, num_tokens, num_heads * dim)
    both = torch.randn(num_tokens, 2 * dim).expand(size, -1, -1)
    qkv = torch.cat([queries, both], 2).to(device)
    qkv[:, batch.slot_mapping < 0] = torch.nan
    position = [
        p for query_len, context in layout.requests for p in range(context, context + query_len)
    ]
    positions = torch.zeros(num_tokens, dtype=torch.long)
    positions[: len(position)] = torch.tensor(position)
    rotary = RotaryEmbedding(
        table=torch.randn(64, dim, device=device),
        qk_norm=torch.rand(num_heads + 1, dim, device=device) if norm else None,
    )
    given: dict[str, Any] = {"qkv": qkv, "rotary": rotary, "positions": positions.to(device)}
    kinds = (TritonContextParallelAttention, ContextParallelAttention)
    (found, caches), (expected, stored) = (
        run_ranks(kind, batch, size, 2, uniform_decode=layout is DECODE, **given) for kind in kinds
    )
    assert expected[: len(position)].abs().amax() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches, stored, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_no_tokens(device: torch.device) -> None:
    batch = build_whole(DECODE, 1, device)
    for name in ("query", "key", "value", "slot_mapping"):
        setattr(batch, name, getattr(batch, name)[:0])
    found, _ = run_ranks(TritonContextParallelAttention, batch, 1, 1)
    assert found.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("attention", "best", "expected"),
    [
        ("auto", "triton", TritonContextParallelAttention),
        ("auto", "numba", ContextParallelAttention),
        ("torch", "torch", ContextParallelAttention),
    ],
)
def test_kernels_are_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, attention: str, best: str, expected: type
) -> None:
    """Triton where one rank would use it."""

    class Named:
        name = best

    monkeypatch.setattr(build, "create_attention", lambda name, device: Named())
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 32, "show_progress": False}
    config = EngineConfig("tiny", random_weights=True, attention=attention, **options)
    context = RankContext(
        layout=ParallelLayout(tp=2, dcp=2),
        rank=0,
        device=torch.device("cpu"),
        comm_of=lambda ranks: NoComm(),
        everyone=NoComm(),
    )
    backend = build.attention_of(config, startup.load(config).model, context)
    assert type(backend) is expected
