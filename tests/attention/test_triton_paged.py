"""Triton's paged attention, compared with a dense softmax and with its plain-torch reference.

Without a GPU the kernels run in Triton's interpreter, which says whether they compute the right
thing, not whether they compile; ``tests/conftest.py`` asks for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import (
    DECODES,
    MIXES,
    Batch,
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
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionBackend
from ostinato.attention.triton.tile_config import BatchShape, TileConfig, tile_config
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.graphs.policy.modes import AttentionCGSupport

pytest.importorskip("triton")

operator = torch.ops.ostinato.triton_paged_attention.default
# The interpreter multiplies the bits of bfloat16 as if they were integers.
HALVES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]
# It takes about 10 ms for every program, and CUDA seconds for every new kernel.
EXAMPLES = 12


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[1, 64], ids=["whole", "split"])
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that keys are never split, or enough that they are even in these small batches."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: request.param)
    return int(request.param)


any_layout = layouts(
    requests=st.lists(
        st.tuples(st.integers(1, 19), st.integers(0, 30))
        | st.tuples(st.just(1), st.integers(0, 150)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([8, 64, 80]),
    value_dim=st.sampled_from([8, 24, 64]),
    window=st.none() | st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, *HALVES]),
)


def scaled(layout: Layout, device: torch.device) -> Batch:
    """The batch with scores of ordinary size, however long its rows."""
    batch = build(layout, device)
    batch.query *= min(1.0, 4 / layout.head_dim**0.5)
    return batch


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@given(layout=any_layout)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_is_the_dense_softmax(num_sms: int, device: torch.device, layout: Layout) -> None:
    check(scaled(layout, device), operator)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (2, 96), (4, 128), (8, 256)])
def test_heads_of_any_size(num_sms: int, device: torch.device, group: int, dim: int) -> None:
    layout = Layout(
        requests=((3, 30), (1, 90)), group=group, head_dim=dim, value_dim=dim, block_size=16
    )
    check(scaled(layout, device), operator)
    for half in HALVES:
        check(scaled(replace(layout, dtype=half, value_dim=64), device), operator)


@pytest.mark.slow
def test_it_is_what_the_reference_computes(num_sms: int, device: torch.device) -> None:
    layout = Layout(
        requests=((25, 3), (1, 200), (2, 0)),
        group=8,
        num_kv_heads=2,
        sinks=True,
        soft_cap=3.0,
        window=99,
        padding_requests=2,
        padding_tokens=5,
    )
    one, two = build(layout, device), build(layout, device)
    torch.testing.assert_close(one.run(operator), run_reference(two), rtol=1e-5, atol=1e-5)
    assert_same_bits(one.key_cache, two.key_cache)
    assert_same_bits(one.value_cache, two.value_cache)


def run_reference(batch: Batch) -> Tensor:
    return batch.run(torch.ops.ostinato.paged_attention.default)


@pytest.mark.sweep
@pytest.mark.parametrize("window", [1, 2, 64, 65, 67, 129])
@pytest.mark.parametrize("context", [0, 62])
def test_windows_at_the_edges_of_blocks(device: torch.device, window: int, context: int) -> None:
    check(build(Layout(requests=((3, context), (1, 130)), window=window), device), operator)


@pytest.mark.slow
def test_slices_of_a_fused_projection_need_no_copy(num_sms: int, device: torch.device) -> None:
    batch = build(Layout(requests=((5, 3), (1, 90), (1, 0)), group=2, num_kv_heads=2), device)
    fused = torch.cat([batch.query, batch.key, batch.value], dim=1)
    batch.query, batch.key, batch.value = fused.split([4, 2, 2], dim=1)
    assert not batch.query.is_contiguous()
    check(batch, operator)


def test_rows_that_are_not_in_one_piece(device: torch.device) -> None:
    batch = build(Layout(requests=((5, 3), (1, 9)), group=2), device)
    for name in ("query", "key", "value"):
        setattr(batch, name, getattr(batch, name).mT.contiguous().mT)
    batch.query = batch.query.repeat_interleave(2, dim=2)[:, :, ::2]
    assert batch.query.stride(2) == 2
    check(batch, operator)


@pytest.mark.parametrize("sinks", [False, True])
def test_large_scores_do_not_overflow(num_sms: int, device: torch.device, sinks: bool) -> None:
    batch = build(Layout(requests=((3, 9), (1, 150)), sinks=sinks), device)
    batch.query *= 100
    if batch.sinks is not None:
        batch.sinks += 500
    # The largest of such scores have an error of their own, hence not the tolerance of `check`.
    torch.testing.assert_close(batch.run(operator), run_reference(batch), rtol=1e-3, atol=1e-4)


def test_more_requests_than_are_searched_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.attention.triton import paged_attention

    num_reqs = 300
    if device.type == "cpu":
        num_reqs = 7
        monkeypatch.setattr(paged_attention, "SEARCH", type(paged_attention.SEARCH)(4))
    lens = tuple((1 + (i % 3 == 0), i % 5) for i in range(num_reqs))
    check(build(Layout(requests=lens, padding_requests=3, padding_tokens=2), device), operator)


# --- dummy and empty batches ----------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("starts", "seq_len", "num_tokens"),
    [
        ([0, 1, 2, 3, 4], 4, 4),  # a decode batch as it is laid out for a capture
        ([0, 2, 4, 9], 9, 9),  # the last request takes what is left
        ([0, 16], 16, 16),  # more keys than the block table has room for
        ([0, 0, 0], 0, 3),  # padding alone
        ([0, 0, 2, 2, 3], 0, 3),  # tokens of requests that have no keys
    ],
)
def test_a_dummy_batch_writes_nothing(
    num_sms: int,
    device: torch.device,
    starts: list[int],
    seq_len: int,
    num_tokens: int,
    sinks: bool,
) -> None:
    batch = dummy(starts, seq_len, num_tokens, device, sinks=sinks)
    caches = expected_caches(batch)
    out = batch.run(operator)
    assert_same_bits(batch.key_cache, caches[0])
    assert_same_bits(batch.value_cache, caches[1])
    keyless = num_keyless(batch)
    assert_same_bits(out[:keyless], torch.zeros_like(out[:keyless]))
    torch.testing.assert_close(out, run_reference(batch), rtol=1e-5, atol=1e-5)


def test_no_tokens_and_no_requests(device: torch.device) -> None:
    batch = build(Layout(requests=((1, 2),), padding_tokens=1), device)
    idle: dict[str, Any] = {
        "query_start_loc": batch.query_start_loc[:1],
        "seq_lens": batch.seq_lens[:0],
        "block_table": batch.block_table[:0],
    }
    out = replace(batch, **idle).run(operator)
    assert_same_bits(out, torch.zeros_like(out))
    names = ("query", "key", "value", "slot_mapping")
    nothing = replace(batch, **idle, **{name: getattr(batch, name)[:0] for name in names})
    assert nothing.run(operator).shape == (0, 1, 8)


# --- tile configs ---------------------------------------------------------------------------------


def shapes(num_tokens: int, num_reqs: int, **changed: int) -> TileConfig:
    given = {"num_heads": 32, "num_kv_heads": 8, "row_bytes": 128, "itemsize": 2}
    given |= {"max_keys": 4096, "num_sms": 132, "shared_memory": 227 << 10}
    return tile_config(BatchShape(num_tokens, num_reqs, **{**given, **changed}))


@given(
    query_lens=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    group=st.sampled_from([1, 3, 4, 8, 71]),
    padding=st.integers(0, 5),
)
def test_there_is_a_tile_for_every_query(query_lens: list[int], group: int, padding: int) -> None:
    num_tokens = sum(query_lens) + padding
    config = shapes(max(1, num_tokens), len(query_lens), num_heads=8 * group)
    assert 1 <= config.block_q * group <= config.block_m
    begin, end, start = 0, 0, 0
    for request, query_len in enumerate(query_lens):  # as the kernel finds them
        begin = (start + request * (config.block_q - 1)) // config.block_q
        assert begin >= end
        end = begin + -(-query_len // config.block_q)
        start += query_len
    assert end <= config.num_tiles


def test_keys_are_split_to_fill_the_gpu_and_no_further() -> None:
    assert shapes(1, 1).num_splits == 64
    assert shapes(8, 8).num_splits == 16
    assert shapes(256, 256).num_splits == 1
    assert shapes(1, 1, max_keys=200).num_splits == 4
    assert shapes(2048, 1).num_splits == 1


def test_a_decode_batch_has_one_tile_per_request() -> None:
    assert shapes(256, 256).num_tiles == 256


# --- inside a graph -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mixes", "num_tokens"), [(DECODES, 4), (MIXES, 12)])
@pytest.mark.parametrize(
    "rules", [{}, {"window": 5, "sinks": True, "soft_cap": 2.0}], ids=["plain", "all_rules"]
)
def test_replay_equals_eager_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
    pool: GraphPool,
    device: torch.device,
    mixes: list[Mix],
    num_tokens: int,
    rules: dict[str, Any],
) -> None:
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: 64)  # split
    check_replays(pool, TritonPagedAttention(), operator, mixes, num_tokens, device, **rules)


# --- the operator and the backend -----------------------------------------------------------------


def test_backend_is_the_operator(device: torch.device) -> None:
    backend: AttentionBackend = TritonPagedAttention()
    assert backend.name == "triton"
    assert backend.support is AttentionCGSupport.ALWAYS
    layout = Layout(requests=((3, 2), (1, 7)), group=2, sinks=True, soft_cap=3.0, window=4)
    one, two = build(layout, device), build(layout, device)
    metadata = replace(one.metadata(), backend=backend)
    query = one.query.requires_grad_()
    out = forward(one.spec(), query, one.key, one.value, metadata, one.sinks)
    assert_same_bits(out, two.run(operator))
    assert_same_bits(one.key_cache, two.key_cache)
    assert not out.requires_grad
    assert not one.key_cache.requires_grad


def test_the_operator_says_what_it_writes(device: torch.device) -> None:
    """Its schema and its fake, as torch.compile will rely on them."""
    batch = build(Layout(requests=((3, 2), (1, 7)), padding_tokens=1, sinks=True), device)
    check_schema(operator, batch.arguments())
