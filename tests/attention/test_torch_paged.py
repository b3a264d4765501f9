"""Paged attention in plain torch, compared with a dense softmax in float64 (``paged_batches``).

Both bodies of the operator are tested on the CPU, and so is the Numba backend; tests that take the
``device`` fixture run the real body on CUDA too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import (
    DECODES,
    MIXES,
    Layout,
    Mix,
    assert_same_bits,
    build,
    check,
    check_replays,
    check_schema,
    dummy,
    expected_caches,
    forward,
    layouts,
    num_keyless,
)
from torch import Tensor

from ostinato import GraphPool
from ostinato.attention import numba_paged
from ostinato.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
)
from ostinato.attention.numba_paged import NumbaPagedAttention
from ostinato.attention.paged import PagedBatch, over_heads
from ostinato.attention.reference import paged_cpu, paged_cuda
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.numba import has_numba

operator = torch.ops.ostinato.paged_attention.default


def compiled(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> None:
    """The Numba backend by the operator's arguments."""
    batch = PagedBatch(*others)
    spec = AttentionSpec(
        layer=0,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        value_dim=value.shape[2],
        scale=batch.scale,
        window=batch.window,
        soft_cap=batch.soft_cap,
    )
    backend = NumbaPagedAttention()
    metadata = AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
        kv_caches=[(batch.key_cache, batch.value_cache)],
        backend=backend,
    )
    backend.forward(spec, query, key, value, metadata, batch.out, batch.sinks)


needs_numba = pytest.mark.skipif(not has_numba(), reason="numba is not installed")
OPERATOR = pytest.param(operator, id="operator")
COMPILED = pytest.param(compiled, id="compiled", marks=needs_numba)
FIXED_SHAPE = pytest.param(over_heads(paged_cuda.paged_attention_cuda), id="fixed_shape")
any_body = pytest.mark.parametrize("body", [OPERATOR, COMPILED, FIXED_SHAPE])
on_the_cpu = pytest.mark.parametrize("body", [OPERATOR, COMPILED])


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small batches exceed."""
    monkeypatch.setattr(paged_cpu, "_QUERY_ROWS", 4)
    monkeypatch.setattr(numba_paged, "MOST_KEYS", 11)
    monkeypatch.setattr(paged_cuda, "_STEP_KEYS", 8)
    monkeypatch.setattr(paged_cuda, "_TILE_SIZE", 4)


requests = st.lists(
    st.tuples(st.integers(1, 11), st.integers(0, 21)) | st.tuples(st.just(1), st.integers(0, 21)),
    min_size=1,
    max_size=5,
)
any_layout = layouts(
    requests=requests.map(tuple),
    group=st.sampled_from([1, 2, 3]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 24]),
    value_dim=st.sampled_from([8, 16, 24]),
    window=st.none() | st.integers(1, 20),
    consecutive_blocks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@any_body
@given(layout=any_layout)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_is_the_dense_softmax(
    short_steps: None, body: Callable[..., None], layout: Layout
) -> None:
    check(build(layout), body)


@given(layout=any_layout)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_on_the_device(device: torch.device, layout: Layout) -> None:
    check(build(layout, device), operator)


@any_body
@pytest.mark.parametrize("context", [0, 37])
@pytest.mark.parametrize("window", [None, 50])
def test_a_long_prompt_is_torchs_own_attention(
    body: Callable[..., None], context: int, window: int | None
) -> None:
    """More queries and keys than go at once, with the limits as they are."""
    layout = Layout(
        requests=((600, context), (1, 5)), group=3, num_kv_heads=2, block_size=16, window=window
    )
    batch = build(layout)
    out = batch.run(body)[:600]
    keys, values = (rows.transpose(0, 1) for rows in batch.dense[0])
    position = torch.arange(context, context + 600)[:, None] - torch.arange(context + 600)
    mask = (position >= 0) & (position < (window or 10_000))
    expected = F.scaled_dot_product_attention(
        batch.query[:600].transpose(0, 1), keys, values, mask, scale=batch.scale, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


@any_body
@pytest.mark.parametrize("window", [1, 5, 6, 7, 8])
@pytest.mark.parametrize("context", [0, 3])
def test_windows_about_as_long_as_the_prompt(
    body: Callable[..., None], window: int, context: int
) -> None:
    check(build(Layout(requests=((7, context), (1, 6)), window=window)), body)


@any_body
def test_slices_of_a_fused_projection_need_no_copy(body: Callable[..., None]) -> None:
    batch = build(Layout(requests=((5, 3), (1, 9), (1, 0)), group=2, num_kv_heads=2))
    fused = torch.cat([batch.query, batch.key, batch.value], dim=1)
    batch.query, batch.key, batch.value = fused.split([4, 2, 2], dim=1)
    assert not batch.query.is_contiguous()
    check(batch, body)


@any_body
@pytest.mark.parametrize("sinks", [False, True])
def test_large_scores_do_not_overflow(body: Callable[..., None], sinks: bool) -> None:
    batch = build(Layout(requests=((3, 9), (1, 4)), sinks=sinks))
    batch.query *= 100
    if batch.sinks is not None:
        batch.sinks += 500
    check(batch, body)


# --- independence ---------------------------------------------------------------------------------


@on_the_cpu
@given(layout=any_layout)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_on_the_cpu_a_request_gives_the_same_bits_alone(
    short_steps: None, body: Callable[..., None], layout: Layout
) -> None:
    batch = build(layout)
    together = batch.run(body)
    token = 0
    for request, (query_len, _) in enumerate(layout.requests):
        rows = slice(token, token + query_len)
        alone = replace(
            batch,
            query=batch.query[rows],
            key=batch.key[rows],
            value=batch.value[rows],
            slot_mapping=batch.slot_mapping[rows],
            query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens=batch.seq_lens[request : request + 1],
            block_table=batch.block_table[request : request + 1],
        )
        assert_same_bits(alone.run(body), together[rows])
        token += query_len


@pytest.mark.slow
@any_body
@given(layout=any_layout)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_limit_on_lengths_changes_no_bit(
    short_steps: None, body: Callable[..., None], layout: Layout
) -> None:
    tight, loose = build(layout), build(layout)
    loose.max_seq_len = 10 * tight.max_seq_len + 7
    assert_same_bits(loose.run(body), tight.run(body))


@any_body
def test_padding_tokens_leave_slot_zero_alone(body: Callable[..., None]) -> None:
    """A finite slot 0 would show a write of anything else, also of NaN turned into 0."""
    batch = build(Layout(requests=((2, 3),), padding_tokens=3, padding_requests=1))
    batch.key_cache[0], batch.value_cache[0] = 1.5, -2.5
    check(batch, body)


# --- dummy and empty batches ----------------------------------------------------------------------


@any_body
@pytest.mark.parametrize(
    ("starts", "seq_len", "num_tokens"),
    [
        ([0, 1, 2, 3, 4], 4, 4),  # a decode batch as it is laid out for a capture
        ([0, 2, 4, 9], 9, 9),  # the last request takes what is left
        ([0, 16], 16, 16),  # more keys than the block table has room for
        ([0, 0, 0], 0, 3),  # padding alone
    ],
)
def test_a_dummy_batch_writes_nothing(
    body: Callable[..., None], starts: list[int], seq_len: int, num_tokens: int
) -> None:
    batch = dummy(starts, seq_len, num_tokens)
    caches = expected_caches(batch)
    out = batch.run(body)
    assert_same_bits(batch.key_cache, caches[0])
    assert_same_bits(batch.value_cache, caches[1])
    assert out.isfinite().all()
    keyless = num_keyless(batch)
    assert_same_bits(out[:keyless], torch.zeros_like(out[:keyless]))
    torch.testing.assert_close(out[keyless:], torch.full_like(out[keyless:], 2.0))


@any_body
def test_no_tokens_and_no_requests(body: Callable[..., None]) -> None:
    batch = build(Layout(requests=((1, 2),)))
    empty = replace(
        batch,
        query=batch.query[:0],
        key=batch.key[:0],
        value=batch.value[:0],
        slot_mapping=batch.slot_mapping[:0],
        query_start_loc=batch.query_start_loc[:1],
        seq_lens=batch.seq_lens[:0],
        block_table=batch.block_table[:0],
    )
    assert empty.run(body).shape == (0, 1, 8)


# --- inside a graph -------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixes", "num_tokens"), [(DECODES, 4), (MIXES, 12)])
@pytest.mark.parametrize(
    "rules", [{}, {"window": 5}, {"sinks": True, "soft_cap": 2.0}], ids=["plain", "window", "sinks"]
)
def test_replay_equals_eager_bit_for_bit(
    pool: GraphPool,
    device: torch.device,
    mixes: list[Mix],
    num_tokens: int,
    rules: dict[str, Any],
) -> None:
    check_replays(pool, TorchPagedAttention(), operator, mixes, num_tokens, device, **rules)


# --- the operator and the backend -----------------------------------------------------------------


def test_backend_is_the_operator(device: torch.device) -> None:
    backend: AttentionBackend = TorchPagedAttention()
    assert backend.name == "torch"
    assert backend.support is AttentionCGSupport.ALWAYS
    layout = Layout(requests=((3, 2), (1, 7)), group=2, sinks=True, soft_cap=3.0, window=4)
    one, two = build(layout, device), build(layout, device)
    out = forward(one.spec(), one.query, one.key, one.value, one.metadata(), one.sinks)
    assert_same_bits(out, two.run(operator))
    assert_same_bits(one.key_cache, two.key_cache)


def test_the_cache_does_not_remember_gradients(device: torch.device) -> None:
    batch = build(Layout(requests=((3, 2),)), device)
    query, key = batch.query.requires_grad_(), batch.key.requires_grad_()
    out = forward(batch.spec(), query, key, batch.value, batch.metadata())
    assert not out.requires_grad
    assert not batch.key_cache.requires_grad


def test_the_operator_says_what_it_writes(device: torch.device) -> None:
    """Its schema and its fake, as torch.compile will rely on them."""
    batch = build(Layout(requests=((3, 2), (1, 7)), padding_tokens=1, sinks=True), device)
    check_schema(operator, batch.arguments())
