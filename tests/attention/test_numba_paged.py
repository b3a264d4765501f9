"""The Numba backend, from the raw QKV to the result.

Attention alone is tested beside the torch backend's, in ``test_torch_paged``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import (
    CPU,
    DECODES,
    MIXES,
    Layout,
    Mix,
    assert_same_bits,
    build,
    check_schema,
    layouts,
)
from rotary_cases import case, check_replays, check_result
from test_torch_paged import compiled
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import create_attention, numba_paged
from ostinato.attention.base import AttentionBackend, attend_qkv
from ostinato.attention.numba_paged import NumbaPagedAttention
from ostinato.attention.paged import PagedBatch
from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport

pytest.importorskip("numba")

any_limit = pytest.mark.parametrize("most_keys", [9, 512], ids=["few_keys", "many_keys"])
any_layout = layouts(
    requests=st.lists(
        st.tuples(st.just(1), st.integers(0, 40))
        | st.tuples(st.integers(1, 6), st.integers(0, 20)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 64, 80]),
    window=st.none() | st.integers(1, 40),
).map(lambda layout: replace(layout, value_dim=layout.head_dim))
examples = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, most_keys: int) -> None:
    monkeypatch.setattr(numba_paged, "MOST_KEYS", most_keys)


@pytest.mark.slow
@any_limit
@given(layout=any_layout, norm=st.booleans())
@examples
def test_any_batch_is_rotated_stored_and_attended(limit: None, layout: Layout, norm: bool) -> None:
    one = case(layout, CPU, norm=norm)
    check_result(one, one.run(NumbaPagedAttention()))


@pytest.mark.slow
@pytest.mark.sweep
@any_limit
@given(layout=any_layout, norm=st.booleans())
@examples
def test_a_request_gives_the_same_bits_alone(limit: None, layout: Layout, norm: bool) -> None:
    one, backend = case(layout, CPU, norm=norm), NumbaPagedAttention()
    together = one.run(backend)
    token = 0
    for request, (query_len, _) in enumerate(layout.requests):
        rows = slice(token, token + query_len)
        metadata = replace(
            one.metadata(backend),
            query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens=one.batch.seq_lens[request : request + 1],
            block_table=one.batch.block_table[request : request + 1],
            slot_mapping=one.batch.slot_mapping[rows],
        )
        alone = replace(one, qkv=one.qkv[rows], positions=one.positions[rows])
        assert_same_bits(alone.run(backend, metadata), together[rows])
        token += query_len


@any_limit
@pytest.mark.parametrize(("mixes", "num_tokens"), [(DECODES, 4), (MIXES, 12)])
def test_replay_equals_eager_bit_for_bit(limit: None, mixes: list[Mix], num_tokens: int) -> None:
    with GraphPool(CPU, lazy_capture=True) as pool:
        check_replays(pool, NumbaPagedAttention(), mixes, num_tokens, CPU, norm=True)


def test_a_piecewise_graph_breaks_at_it() -> None:
    layout = Layout(requests=((1, 9), (1, 33)), group=2)
    one, backend = case(layout, CPU), NumbaPagedAttention()

    def step() -> Tensor:
        return attend_qkv(one.batch.spec(), one.qkv * 2, one.rotary, one.positions) + 1

    with (
        GraphPool(CPU, lazy_capture=True) as pool,
        set_forward_context(attn_metadata=one.metadata(backend)),
    ):
        captured = pool.capture(step, split_at_breaks=True)
        assert captured.tape.has_breaks
        assert captured.tape.num_copies == 0
        one.qkv.mul_(0.5)
        pool.replay(captured.tape)
        torch.testing.assert_close(captured.output, case(layout, CPU).run(backend) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_go_to_torch(dtype: torch.dtype) -> None:
    one = case(Layout(requests=((3, 9), (1, 20)), group=3, dtype=dtype), CPU, norm=True)
    check_result(one, one.run(NumbaPagedAttention()))


def test_nan_stays_visible() -> None:
    """A NaN key makes the result of every query that sees it NaN, as with torch."""
    batch = build(Layout(requests=((1, 9),), head_dim=8))
    batch.value_cache[:] = 1.0
    block = int(batch.block_table[0, 0])
    batch.key_cache[block, 0] = torch.nan
    assert batch.run(compiled).isnan().all()


@pytest.mark.parametrize("wrong", ["positions", "slot_mapping", "block_table"])
def test_what_lies_outside_of_the_tensors_is_an_error(wrong: str) -> None:
    one, backend = case(Layout(requests=((1, 9),)), CPU), NumbaPagedAttention()
    metadata = one.metadata(backend)
    if wrong == "positions":
        one.positions[0] = len(one.rotary.table)
    else:
        getattr(metadata, wrong).fill_(metadata.kv_caches[0][0].numel())
    with pytest.raises(IndexError, match="out of range"):
        one.run(backend, metadata)


@pytest.mark.parametrize("wrong", ["slot_mapping", "query_start_loc", "block_table", "positions"])
def test_tensors_that_are_too_short_are_an_error(wrong: str) -> None:
    one, backend = case(Layout(requests=((1, 9), (1, 4))), CPU), NumbaPagedAttention()
    metadata = one.metadata(backend)
    if wrong == "positions":
        one.positions = one.positions[:-1]
    else:
        shorter = {wrong: getattr(metadata, wrong)[:-1]}
        metadata = replace(metadata, uniform_decode=False, **shorter)
    with pytest.raises(BatchError, match=r"one row per token|in query_start_loc"):
        one.run(backend, metadata)


def test_a_norm_that_has_too_few_weights_is_an_error() -> None:
    one = case(Layout(requests=((1, 9),), group=2), CPU, norm=True)
    assert one.rotary.qk_norm is not None
    one.rotary.qk_norm = one.rotary.qk_norm[:-1]
    with pytest.raises(ConfigError, match=r"qk_norm has shape \(2, 8\); 3 query and key heads"):
        one.run(NumbaPagedAttention())


@pytest.mark.parametrize("how", ["int32", "strided"])
def test_positions_of_any_kind(how: str) -> None:
    one = case(Layout(requests=((2, 9), (1, 4))), CPU)
    if how == "int32":
        one.positions = one.positions.int()
    else:
        one.positions = torch.stack((one.positions, one.positions + 1), dim=1)[:, 0]
    check_result(one, one.run(NumbaPagedAttention()))


@pytest.mark.parametrize("how", ["bfloat16", "strided"])
def test_sinks_of_any_kind_are_read_by_every_replay(how: str) -> None:
    one, backend = case(Layout(requests=((1, 9),), group=4, sinks=True), CPU), NumbaPagedAttention()
    sinks = torch.randn(4, 2).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    one.batch.sinks = sinks[:, 0] if how == "strided" else sinks[:, 0].contiguous()
    metadata = one.metadata(backend)
    with GraphPool(CPU, lazy_capture=True) as pool:
        captured = pool.capture(lambda: one.run(backend, metadata))
        before = captured.output.clone()
        one.batch.sinks.add_(3.0)
        pool.replay(captured.tape)
        assert not torch.equal(captured.output, before)
        assert_same_bits(captured.output, one.run(backend, metadata))


def test_it_is_the_default_of_the_cpu_and_not_for_others() -> None:
    backend: AttentionBackend = create_attention("auto", CPU)
    assert backend.name == "numba"
    assert backend.support is AttentionCGSupport.ALWAYS
    with pytest.raises(
        ConfigError, match=r"'numba' needs the CPU .* cuda:0, and numba is installed"
    ):
        create_attention("numba", torch.device("cuda", 0))


def test_without_numba_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.attention.has_numba", lambda: False)
    assert create_attention("auto", CPU).name == "torch"
    with pytest.raises(ConfigError, match="needs the CPU and the package numba"):
        create_attention("numba", CPU)


def test_the_operators_say_what_they_write() -> None:
    one = case(Layout(requests=((3, 2), (1, 7)), padding_tokens=1, sinks=True), CPU, norm=True)
    batch, spec = one.batch, one.batch.spec()
    out = torch.empty(batch.query.shape)
    shared = PagedBatch.of(spec, one.metadata(NumbaPagedAttention()), out, batch.sinks)
    rotary = one.rotary
    one.positions.clamp_(max=8)
    heads = batch.query.contiguous(), batch.key.contiguous(), batch.value.contiguous()
    for operator, args in (
        (torch.ops.ostinato.compiled_attention.default, heads),
        (
            torch.ops.ostinato.compiled_rotary_attention.default,
            (one.qkv, one.positions, rotary.table, rotary.qk_norm, rotary.eps),
        ),
    ):
        check_schema(operator, (*args, *shared))
