"""Attention of prompts, and of single queries among them, in the kernels for Hopper.

Compared with a dense softmax in float64. Gluon has no interpreter, so these shapes run on the GPU
alone. What no query may see is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import MIXES, Layout, build, check, check_replays, layouts

from ostinato import GraphPool
from ostinato.attention import triton_paged
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.compat import runs_gluon

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_gluon(CUDA)), reason="needs a Hopper GPU and Gluon"
)
operator = torch.ops.ostinato.triton_paged_attention.default


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batches of every size are enough to fill a GPU of one SM; counts those that used it."""
    from ostinato.attention.triton import prefill_attention as kernel

    seen: list[int] = []
    original = kernel.prefill_attention

    def counted(query: torch.Tensor, batch: object, **options: bool) -> None:
        seen.append(query.shape[0])
        original(query, batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_paged, "num_sms", lambda _: 1)
    monkeypatch.setattr(kernel, "prefill_attention", counted)
    return seen


PROMPTS = ((300, 0), (1, 200), (77, 33), (5, 900), (1, 0), (130, 65))
LAYOUT = Layout(
    requests=PROMPTS,
    group=4,
    num_kv_heads=2,
    head_dim=128,
    value_dim=128,
    block_size=16,
    dtype=torch.bfloat16,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"group": 1},
        {"group": 3},
        {"group": 8, "head_dim": 64, "value_dim": 64},
        {"group": 16, "num_kv_heads": 1},
        {"group": 17, "num_kv_heads": 1},
        {"group": 2, "head_dim": 256, "value_dim": 256},
        {"head_dim": 96, "value_dim": 96},
        {"head_dim": 80, "value_dim": 80},
        {"head_dim": 192, "value_dim": 128},
        {"block_size": 8},
        {"block_size": 32},
        {"block_size": 256},
        {"window": 1},
        {"window": 100},
        {"window": 257},
        {"soft_cap": 3.0},
        {"sinks": True},
        {"sinks": True, "soft_cap": 0.5, "window": 50},
        {"padding_requests": 9, "padding_tokens": 40},
        {"requests": ((1, 3000), (2, 0), *(((1, 7), (1, 900)) * 70))},
        {"requests": ((1, 0), (1, 63), (1, 64), (1, 127), (1, 128), (3, 0)), "window": 65},
    ],
    ids=str,
)
def test_prompts_of_any_kind(calls: list[int], change: dict[str, object]) -> None:
    check(build(replace(LAYOUT, **change), CUDA), operator)  # type: ignore[arg-type]
    assert calls, "another kernel ran"


drawn = layouts(
    requests=st.lists(
        st.tuples(st.integers(2, 300), st.integers(0, 400))
        | st.tuples(st.just(1), st.integers(0, 600)),
        min_size=1,
        max_size=6,
    )
    .filter(lambda requests: any(query_len > 1 for query_len, _ in requests))
    .map(tuple),
    group=st.just(4),
    num_kv_heads=st.just(2),
    head_dim=st.just(128),
    value_dim=st.just(128),
    block_size=st.just(16),
    window=st.none() | st.integers(1, 500),
    dtype=st.just(torch.bfloat16),
)


@given(layout=drawn)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(calls: list[int], layout: Layout) -> None:
    check(build(layout, CUDA), operator)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"block_size": 4},
        {"head_dim": 32, "value_dim": 32},
    ],
    ids=str,
)
def test_other_batches_take_another_kernel(calls: list[int], change: dict[str, object]) -> None:
    check(build(replace(LAYOUT, **change), CUDA), operator)  # type: ignore[arg-type]
    assert not calls


def test_a_replay_has_the_bits_of_an_eager_call(calls: list[int]) -> None:
    rules = {name: getattr(LAYOUT, name) for name in ("group", "head_dim", "value_dim", "dtype")}
    with GraphPool(CUDA, lazy_capture=True) as pool:
        check_replays(
            pool, TritonPagedAttention(), operator, MIXES, 12, CUDA, block_size=16, **rules
        )
    assert calls
