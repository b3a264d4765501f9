"""Attention over one rank's part of the keys in Triton, and the combination of all parts.

Compared with a float64 softmax and ``torch.logsumexp``. Without a GPU the kernels run in Triton's
interpreter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import Layout, dummy, layouts
from part_batches import build_whole, check_parts, rows_of, stored_part

from ostinato.attention import triton_paged
from ostinato.attention.triton_paged import triton_part_attention
from ostinato.parallel.context.context_parallel import combine
from ostinato.parallel.context.context_part import ContextPart

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[1, 64], ids=["whole", "split"])
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that keys are never split, or enough that they are even in these small batches."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: request.param)
    return int(request.param)


MIXED = Layout(
    requests=((1, 0), (9, 0), (1, 40), (5, 17), (2, 1)),
    group=3,
    num_kv_heads=2,
    value_dim=6,
    padding_requests=2,
    padding_tokens=3,
)
DECODE = replace(
    MIXED, requests=((1, 0), (1, 40), (1, 2), (1, 90)), padding_requests=2, padding_tokens=2
)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("size", "interleave", "sms"), [(1, 1, 64), (2, 1, 1), (2, 4, 64), (4, 1, 64), (4, 2, 1)]
)
@pytest.mark.parametrize("layout", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "rules",
    [{}, {"soft_cap": 3.0, "sinks": True}, {"window": 9}],
    ids=lambda rules: "-".join(rules) or "plain",
)
def test_parts_are_attention_over_their_keys(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    layout: Layout,
    size: int,
    interleave: int,
    sms: int,
    rules: dict[str, Any],
) -> None:
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: sms)
    check_parts(replace(layout, **rules), size, interleave, device)


@pytest.mark.slow
@given(
    layout=layouts(
        requests=st.lists(
            st.tuples(st.integers(1, 19), st.integers(0, 30))
            | st.tuples(st.just(1), st.integers(0, 150)),
            min_size=1,
            max_size=3,
        ).map(tuple),
        group=st.sampled_from([1, 3, 8]),
        head_dim=st.sampled_from([8, 64]),
        value_dim=st.sampled_from([8, 24]),
        block_size=st.sampled_from([4, 16]),
        window=st.none() | st.integers(1, 150),
        dtype=st.sampled_from([torch.float32, torch.float16]),
    ),
    size=st.sampled_from([2, 3, 4]),
    interleave=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch(
    num_sms: int, device: torch.device, layout: Layout, size: int, interleave: int
) -> None:
    check_parts(layout, size, interleave, device)


@pytest.mark.parametrize("uniform", [False, True])
def test_a_part_without_keys(num_sms: int, device: torch.device, uniform: bool) -> None:
    """The second rank of two has none of a request of one token: -inf, and nothing of it counts."""
    batch = build_whole(Layout(requests=((1, 0), (1, 0)), group=2), 2, device)
    part = ContextPart(2, 1, 4)
    rows = stored_part(batch, part, uniform_decode=uniform)
    triton_part_attention(batch.query, rows, part.local_seq_lens(batch.seq_lens), part)
    assert (rows_of(rows)[..., -1] == -math.inf).all()


def test_a_dummy_batch_of_a_capture(num_sms: int, device: torch.device) -> None:
    """It claims more keys than the tables have room for; all there are have the value 2."""
    batch = dummy([0, 1, 2, 3, 4], 99, 4, device)
    part = ContextPart(2, 1, 1)
    rows = stored_part(batch, part)._replace(key_cache=batch.key_cache)
    rows = rows._replace(value_cache=batch.value_cache)
    triton_part_attention(batch.query, rows, batch.seq_lens, part)
    torch.testing.assert_close(rows.out, torch.full_like(rows.out, 2.0))


def test_no_requests(device: torch.device) -> None:
    """All of the combined result is zero, whatever is in the parts."""
    from ostinato.attention.triton.combine_ranks import combine_ranks

    batch = build_whole(Layout(requests=((1, 2),), padding_tokens=1), 2, device)
    batch.query_start_loc, batch.seq_lens = batch.query_start_loc[:1], batch.seq_lens[:0]
    rows = stored_part(batch, ContextPart(2, 0, 1))
    triton_part_attention(batch.query, rows, batch.seq_lens, ContextPart(2, 0, 1))
    out = torch.full((2, 1, 8), math.nan, device=device)
    combine_ranks(rows_of(rows)[None], batch.query_start_loc, out)
    assert (out == 0).all()


def test_values_without_a_key_are_not_read(device: torch.device) -> None:
    """The kernel for Hopper does not write them."""
    from ostinato.attention.triton.combine_ranks import combine_ranks

    torch.manual_seed(0)
    parts = torch.randn(3, 2, 4, 9, device=device)  # 3 ranks, 2 heads, 4 tokens
    parts[0, :, 0], parts[1:, :, 1], parts[:, :, 2] = math.nan, math.nan, math.nan
    parts[0, :, 0, -1], parts[1:, :, 1, -1], parts[:, :, 2, -1] = (-math.inf,) * 3
    parts[:, :, 3] = math.nan  # padding
    out = torch.full((4, 2, 8), math.nan, device=device)
    combine_ranks(parts, torch.tensor([0, 2, 3], dtype=torch.int32, device=device), out)
    known = parts.nan_to_num(0.0, neginf=-math.inf)
    expected = combine(known[..., :-1], known[..., -1]).transpose(0, 1)
    torch.testing.assert_close(out[:2], expected[:2])
    assert (out[2:] == 0).all()
