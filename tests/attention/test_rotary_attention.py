"""From the raw QKV to attention: torch's operators, and Triton's one kernel or three.

``rotary_cases`` has the oracle. Without a GPU the kernels run in Triton's interpreter, as those of
``test_triton_paged`` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import MIXES, Layout, Mix, assert_same_bits, check_schema, layouts
from rotary_cases import Case, case, check_replays, check_result
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionBackend, attend_qkv
from ostinato.attention.paged import PagedBatch
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.triton import stream_decode
from ostinato.attention.triton.paged_attention import paged_attention
from ostinato.attention.triton.tile_config import (
    MAX_COMBINED_SPLITS,
    BatchShape,
    StreamRule,
    decode_tile_config,
    stream_rule,
    tile_config,
)
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.errors import ConfigError

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16]
EXAMPLES = 6  # the interpreter takes about 10 ms for every program


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[1, 16], ids=["whole", "split"])
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that keys are never split, or enough that they are even in these small batches."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: request.param)
    return int(request.param)


def check(case: Case, *, ulps: float = 4.0) -> Tensor:
    """Run it with Triton: right results, zeros for padding, a cache written where it should be."""
    out = case.run(TritonPagedAttention())
    check_result(case, out, ulps=ulps)
    return out


queries = st.tuples(st.integers(1, 11), st.integers(0, 30)) | st.tuples(
    st.just(1), st.integers(0, 150)
)
decodes = st.tuples(st.just(1), st.integers(0, 150))


def rotary_layouts(requests: st.SearchStrategy[tuple[int, int]], *, decode: bool) -> Any:
    layout = layouts(
        requests=st.lists(requests, min_size=1, max_size=3).map(tuple),
        group=st.sampled_from([1, 3, 4, 8]),
        head_dim=st.sampled_from([8, 64, 80]),
        window=st.none() | st.integers(1, 150),
        dtype=st.sampled_from(DTYPES),
    )

    def same_dims(layout: Layout) -> Layout:
        padding = layout.padding_requests if decode else layout.padding_tokens
        return replace(layout, value_dim=layout.head_dim, padding_tokens=padding)

    return layout.map(same_dims)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@given(layout=rotary_layouts(decodes, decode=True), norm=st.booleans())
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_decode_batch(num_sms: int, device: torch.device, layout: Layout, norm: bool) -> None:
    check(case(layout, device, norm=norm))


@pytest.mark.slow
@given(layout=rotary_layouts(queries, decode=False), norm=st.booleans())
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch(num_sms: int, device: torch.device, layout: Layout, norm: bool) -> None:
    check(case(layout, device, norm=norm))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "dim", "norm"), [(1, 128, True), (3, 64, False), (4, 64, True), (8, 80, False)]
)
@pytest.mark.parametrize(
    "requests", [((1, 0), (1, 90), (1, 32)), ((3, 30), (1, 90))], ids=["decode", "mixed"]
)
def test_heads_of_any_size(
    num_sms: int,
    device: torch.device,
    requests: tuple[tuple[int, int], ...],
    group: int,
    dim: int,
    norm: bool,
) -> None:
    layout = Layout(
        requests=requests,
        group=group,
        num_kv_heads=2,
        head_dim=dim,
        value_dim=dim,
        block_size=16,
        padding_requests=1,
        padding_tokens=1,
    )
    check(case(layout, device, norm=norm))
    check(case(replace(layout, dtype=torch.float16), device, norm=norm))


@pytest.mark.sweep
@pytest.mark.parametrize("rules", [{}, {"window": 33}, {"sinks": True, "soft_cap": 2.0}])
@pytest.mark.parametrize("length", [1, 2, 32, 33, 64, 65, 129])
def test_lengths_at_the_edges_of_shares(
    num_sms: int, device: torch.device, length: int, rules: dict[str, Any]
) -> None:
    """The new key is alone in its share, or the first or last of one."""
    layout = Layout(requests=((1, length - 1),), group=2, block_size=16, **rules)
    check(case(layout, device))


@pytest.mark.sweep
@pytest.mark.parametrize("window", [1, 2, 32, 34, 64])
def test_windows_at_the_edges_of_blocks(num_sms: int, device: torch.device, window: int) -> None:
    check(case(Layout(requests=((1, 64), (1, 31), (1, 130)), window=window), device))


LENGTHS = {"even": (50, 60, 60), "uneven": (3, 90, 2), "short": (4, 5, 4), "one": (90,)}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rule", "streamed"),
    [
        (StreamRule(0, 0), {"even", "uneven", "short", "one"}),
        (StreamRule(60, 0), {"even", "uneven", "one"}),
        (StreamRule(0, 3), {"uneven"}),
        (StreamRule(91, 0), set()),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_decide_whether_the_kernel_attends(
    num_sms: int,
    device: torch.device,
    lengths: str,
    rule: StreamRule,
    streamed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it leaves that to even shares, their queries, keys and values are complete.

    The kernel for any batch stands in for the one of even shares, which needs a GPU.
    """
    attended = []

    def attend_instead(query: Tensor, batch: PagedBatch, *, rule: StreamRule | None) -> None:
        if lengths in streamed:
            attended.append(query)
            paged_attention(query, batch, tile_config(BatchShape.of(batch, num_sms)))

    monkeypatch.setattr(triton_paged, "stream_rule", lambda _: rule)
    monkeypatch.setattr(triton_paged, "_fits_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(stream_decode, "stream_decode", attend_instead)
    requests = tuple((1, length - 1) for length in LENGTHS[lengths])
    layout = Layout(requests=requests, group=2, block_size=16, padding_requests=1, padding_tokens=1)
    check(case(layout, device, norm=True))
    assert len(attended) == (lengths in streamed)


def test_even_shares_are_for_batches_that_may_need_them() -> None:
    qwen = BatchShape(256, 256, 32, 8, 256, 2, 16384, 132, 227 << 10)
    assert stream_rule(qwen) == StreamRule(min_longest=512, min_spread=3)
    assert stream_rule(qwen._replace(max_keys=1024)) is None
    assert stream_rule(qwen._replace(num_reqs=64)) is None
    assert stream_rule(qwen._replace(num_reqs=4)) is None
    long = qwen._replace(num_reqs=4, max_keys=32768)
    assert stream_rule(long) == StreamRule(min_longest=0, min_spread=0)
    assert stream_rule(qwen._replace(num_kv_heads=1)) is None  # 32 heads in a group


def test_old_contents_of_the_new_slot_are_never_read(num_sms: int, device: torch.device) -> None:
    """The slots of new tokens hold NaN at first, as do all that were never written."""
    one = case(Layout(requests=((1, 40), (1, 7)), group=4, padding_requests=1), device)
    slots = one.batch.slot_mapping[one.batch.slot_mapping >= 0]
    for cache in (one.batch.key_cache, one.batch.value_cache):
        assert cache.flatten(0, 1)[slots].isnan().all()
    check(one)


@pytest.mark.slow
def test_qkv_with_strides(num_sms: int, device: torch.device) -> None:
    for requests in (((1, 40), (1, 7)), ((3, 40), (1, 7))):
        one = case(Layout(requests=requests, group=2), device)
        wide = torch.full((one.qkv.shape[0], one.qkv.shape[1] + 8), torch.nan, device=device)
        wide[:, :-8] = one.qkv
        one.qkv = wide[:, :-8]
        check(one)
        two = case(Layout(requests=requests, group=2), device)
        two.qkv = two.qkv.T.contiguous().T
        check(two)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_dummy_batch_writes_nothing(num_sms: int, device: torch.device, sinks: bool) -> None:
    """More keys than the table has room for, and no slots."""
    one = case(Layout(requests=((1, 3), (1, 3)), sinks=sinks), device)
    batch = one.batch
    batch.seq_lens.fill_(1 << 20)
    batch.block_table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    batch.slot_mapping.fill_(-1)
    batch.key_cache[:], batch.value_cache[:] = 1.0, 2.0
    out = one.run(TritonPagedAttention())
    assert out.isfinite().all()
    assert (batch.key_cache == 1.0).all()
    assert (batch.value_cache == 2.0).all()


def test_no_tokens_and_no_requests(device: torch.device) -> None:
    one = case(Layout(requests=((1, 2),), padding_tokens=1), device)
    idle: dict[str, Any] = {
        "query_start_loc": one.batch.query_start_loc[:1],
        "seq_lens": one.batch.seq_lens[:0],
        "block_table": one.batch.block_table[:0],
    }
    backend = TritonPagedAttention()
    metadata = replace(one.metadata(backend), **idle)
    out = one.run(backend, metadata)
    assert_same_bits(out, torch.zeros_like(out))
    one.qkv, one.positions = one.qkv[:0], one.positions[:0]
    nothing = replace(metadata, slot_mapping=metadata.slot_mapping[:0])
    assert one.run(backend, nothing).shape == (0, 1, 8)


# --- torch's operators ----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_backends_get_heads_that_are_rotated(norm: bool, dtype: torch.dtype) -> None:
    layout = Layout(requests=((3, 9), (1, 20)), group=3, num_kv_heads=2, dtype=dtype)
    one = case(layout, torch.device("cpu"), norm=norm)
    check_result(one, one.run(TorchPagedAttention()))


def test_rows_of_the_wrong_length_are_refused() -> None:
    one = case(Layout(requests=((3, 9),)), torch.device("cpu"))
    one.qkv = one.qkv[:, :-8]
    with pytest.raises(ConfigError, match=r"rows of 16 numbers.* need 24"):
        one.run(TorchPagedAttention())


# --- which batches are decode batches -------------------------------------------------------------


def test_a_decode_batch_has_a_token_for_each_request() -> None:
    one = case(Layout(requests=((1, 3), (1, 4))), torch.device("cpu"))
    metadata = one.metadata(TritonPagedAttention())
    assert metadata.uniform_decode
    with pytest.raises(ConfigError, match=r"one token for each request.* 2 tokens and 1 requests"):
        replace(metadata, seq_lens=metadata.seq_lens[:1])


def decode_splits(num_reqs: int, **changed: int) -> int:
    given = {"num_heads": 32, "num_kv_heads": 8, "row_bytes": 128, "itemsize": 2}
    given |= {"max_keys": 4096, "num_sms": 132, "shared_memory": 227 << 10}
    return decode_tile_config(BatchShape(num_reqs, num_reqs, **{**given, **changed})).num_splits


def test_keys_are_split_to_fill_the_gpu_and_no_further() -> None:
    assert decode_splits(1) == MAX_COMBINED_SPLITS
    assert decode_splits(1, max_keys=100) == 4
    assert decode_splits(256) == 1


@pytest.mark.parametrize(
    ("num_kv_heads", "row_bytes", "itemsize"),
    [(8, 512, 2), (8, 1024, 2), (1, 1024, 2), (8, 1024, 4), (8, 2048, 4)],
)
@pytest.mark.parametrize("num_tokens", [4, 2048])
def test_tiles_fit_the_shared_memory_of_small_gpus(
    num_tokens: int, num_kv_heads: int, row_bytes: int, itemsize: int
) -> None:
    """Queries, keys and values of a tile, at least; the rest is below 2 KB."""
    shape = BatchShape(num_tokens, 4, 32, num_kv_heads, row_bytes, itemsize, 4096, 128, 99 << 10)
    config = tile_config(shape)
    assert (config.block_m + 2 * config.block_n) * row_bytes + 2048 <= shape.shared_memory
    if row_bytes == 256 * itemsize:
        assert config == tile_config(shape._replace(shared_memory=227 << 10))


# --- inside graphs --------------------------------------------------------------------------------


LONG_DECODES = [  # four requests, four tokens
    ((1, 99), (1, 0), (1, 3), (1, 70)),
    ((1, 7), (1, 120), (1, 32)),
]


ALL_RULES = {"window": 50, "sinks": True, "soft_cap": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixes", "num_tokens", "rules"),
    [(LONG_DECODES, 4, {"window": 80}), (MIXES[1:3], 12, ALL_RULES)],
    ids=["decode", "mixed"],
)
def test_replay_equals_eager_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
    pool: GraphPool,
    device: torch.device,
    mixes: list[Mix],
    num_tokens: int,
    rules: dict[str, Any],
) -> None:
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: 8)  # decodes are split
    check_replays(pool, TritonPagedAttention(), mixes, num_tokens, device, **rules)


@pytest.mark.parametrize(
    "make", [TritonPagedAttention, TorchPagedAttention], ids=["triton", "torch"]
)
def test_a_piecewise_graph_breaks_at_it(
    pool: GraphPool, device: torch.device, make: Callable[[], AttentionBackend]
) -> None:
    """The segment before allocates the result, the eager call fills it, the one after reads it."""
    one = case(Layout(requests=((1, 9), (1, 33)), group=2), device, norm=True)
    backend = make()
    metadata = one.metadata(backend)
    spec, rotary = one.batch.spec(), one.rotary

    def step() -> Tensor:
        return attend_qkv(spec, one.qkv * 2, rotary, one.positions) + 1

    with set_forward_context(attn_metadata=metadata):
        captured = pool.capture(step, split_at_breaks=True)
        assert captured.tape.has_breaks
        assert captured.tape.num_copies == 0
        one.qkv.mul_(0.5)
        pool.replay(captured.tape)
    two = case(Layout(requests=((1, 9), (1, 33)), group=2), device, norm=True)
    torch.testing.assert_close(captured.output, two.run(backend) + 1)


def test_the_operator_says_what_it_writes(device: torch.device) -> None:
    one = case(Layout(requests=((3, 2), (1, 7)), padding_tokens=1, sinks=True), device, norm=True)
    rotary = (one.rotary.table, one.rotary.qk_norm, one.rotary.eps)
    arguments = (one.qkv, one.positions, *rotary, *one.batch.arguments()[3:])
    check_schema(torch.ops.ostinato.triton_qkv_attention.default, arguments)
