"""From the raw QKV product to attention: torch's way, and Triton's in one kernel or three.

The oracle rotates pairs as complex numbers in float64 and attends with the plain-torch operator,
which has tests of its own. Without a GPU the kernels run in Triton's interpreter, as those of
``test_triton_paged`` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_torch_paged import MIXES, Batch, Layout, assert_same_bits, build, padded
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionBackend, AttentionMetadata, attend_qkv
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.torch_paged import TorchPagedAttention
from ostinato.attention.triton.tile_config import (
    MAX_COMBINED_SPLITS,
    BatchShape,
    decode_tile_config,
)
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.errors import ConfigError

pytest.importorskip("triton")

EPS = 1e-5
MAX_POSITION = 400
FAR_AWAY = 1 << 40
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


@dataclass(kw_only=True)
class Case:
    """A batch by its raw product, and what must become of it."""

    batch: Batch  # its query and key are the raw ones
    expected: Batch  # the same, rotated
    qkv: Tensor
    rotary: RotaryEmbedding
    positions: Tensor

    def metadata(self, backend: AttentionBackend) -> AttentionMetadata:
        lens = self.batch.query_start_loc.diff()
        longest = max(1, int(lens.max()))
        return replace(
            self.batch.metadata(),
            backend=backend,
            max_query_len=longest,
            uniform_decode=longest == 1 and len(lens) == len(self.qkv),
        )

    def run(self, backend: AttentionBackend, metadata: AttentionMetadata | None = None) -> Tensor:
        metadata = metadata or self.metadata(backend)
        with set_forward_context(attn_metadata=metadata):
            return attend_qkv(
                self.batch.spec(), self.qkv, self.rotary, self.positions, self.batch.sinks
            )

    def tensors(self) -> list[Tensor]:
        """Everything that a graph would find at fixed addresses."""
        return [self.qkv, self.positions, *self.batch.tensors()[3:]]


def rotated(heads: Tensor, positions: Tensor, weight: Tensor | None) -> Tensor:
    """RoPE as a product of complex numbers, in float64."""
    half = heads.shape[-1] // 2
    exact = heads.double()
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    angles = torch.outer(positions.double(), frequencies(half))[:, None]
    pairs = torch.complex(exact[..., :half], exact[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(heads.dtype)


def frequencies(half: int) -> Tensor:
    return 1.0 / 100.0 ** (torch.arange(half).double() / half)


def case(layout: Layout, device: torch.device, *, norm: bool = False, min_blocks: int = 0) -> Case:
    """The batch of ``layout`` as a raw product; positions of padding are nowhere."""
    batch = build(layout, min_blocks=min_blocks)
    generator = torch.Generator().manual_seed(layout.seed + 1)
    num_heads, num_kv_heads = batch.query.shape[1], layout.num_kv_heads
    half = layout.head_dim // 2
    batch.query *= min(1.0, 4 / layout.head_dim**0.5)
    weight = None
    if norm:
        weight = torch.rand(num_heads + num_kv_heads, 2 * half, generator=generator) + 0.5
        weight[:num_heads] *= min(1.0, 4 / layout.head_dim**0.5)
        weight = weight.to(layout.dtype)
    positions = torch.zeros(batch.query.shape[0], dtype=torch.int64)
    starts = batch.query_start_loc.tolist()
    for request, (query_len, context) in enumerate(layout.requests):
        positions[starts[request] : starts[request] + query_len] = context + torch.arange(query_len)
    split = (None, None) if weight is None else weight.split((num_heads, num_kv_heads))
    expected = replace(
        batch,
        query=rotated(batch.query, positions, split[0]),
        key=rotated(batch.key, positions, split[1]),
        key_cache=batch.key_cache.clone(),
        value_cache=batch.value_cache.clone(),
    )
    positions[starts[-1] :] = FAR_AWAY
    angles = torch.outer(torch.arange(MAX_POSITION).double(), frequencies(half))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    on_device: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return Case(
        batch=replace(batch, **on_device),
        expected=expected,
        qkv=torch.cat((batch.query, batch.key, batch.value), dim=1).flatten(1).to(device),
        rotary=RotaryEmbedding(
            table=table.to(device), qk_norm=None if weight is None else weight.to(device), eps=EPS
        ),
        positions=positions.to(device),
    )


def check(case: Case, *, ulps: float = 4.0) -> Tensor:
    """Run it with Triton: right results, zeros for padding, a cache written where it should be."""
    out = case.run(TritonPagedAttention())
    check_result(case, out, ulps=ulps)
    return out


def check_result(case: Case, out: Tensor, *, ulps: float = 4.0) -> None:
    expected = case.expected
    operator = torch.ops.ostinato.paged_attention.default
    right = expected.run(operator)
    eps = torch.finfo(out.dtype).eps
    tolerance = 2e-5 if out.dtype is torch.float32 else ulps * eps
    torch.testing.assert_close(out.cpu(), right, rtol=tolerance, atol=tolerance)
    # Rotated keys may be rounded the other way; everything else is the same to the bit.
    near = {"rtol": 2 * eps, "atol": 2e-6 if out.dtype is torch.float32 else 2 * eps}
    torch.testing.assert_close(
        case.batch.key_cache.cpu(), expected.key_cache, equal_nan=True, **near
    )
    assert_same_bits(case.batch.value_cache.cpu(), expected.value_cache)


queries = st.tuples(st.integers(1, 11), st.integers(0, 30)) | st.tuples(
    st.just(1), st.integers(0, 150)
)
decodes = st.tuples(st.just(1), st.integers(0, 150))


def layouts(requests: st.SearchStrategy[tuple[int, int]], *, decode: bool) -> Any:
    layout = st.builds(
        Layout,
        requests=st.lists(requests, min_size=1, max_size=3).map(tuple),
        group=st.sampled_from([1, 3, 4, 8]),
        num_kv_heads=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([8, 64, 80]),
        block_size=st.sampled_from([1, 4, 16]),
        window=st.none() | st.integers(1, 150),
        soft_cap=st.none() | st.sampled_from([0.5, 3.0]),
        sinks=st.booleans(),
        padding_requests=st.integers(0, 2),
        padding_tokens=st.integers(0, 2),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1 << 16),
    )

    def as_product(layout: Layout) -> Layout:
        padding = layout.padding_requests if decode else layout.padding_tokens
        return replace(layout, value_dim=layout.head_dim, padding_tokens=padding)

    return layout.map(as_product)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@given(layout=layouts(decodes, decode=True), norm=st.booleans())
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_decode_batch(num_sms: int, device: torch.device, layout: Layout, norm: bool) -> None:
    check(case(layout, device, norm=norm))


@pytest.mark.slow
@given(layout=layouts(queries, decode=False), norm=st.booleans())
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


def test_old_contents_of_the_new_slot_are_never_read(num_sms: int, device: torch.device) -> None:
    """The slots of new tokens hold NaN before, as all that nobody wrote; say so once."""
    one = case(Layout(requests=((1, 40), (1, 7)), group=4, padding_requests=1), device)
    slots = one.batch.slot_mapping[one.batch.slot_mapping >= 0]
    for cache in (one.batch.key_cache, one.batch.value_cache):
        assert cache.flatten(0, 1)[slots].isnan().all()
    check(one)


@pytest.mark.slow
def test_a_product_with_strides(num_sms: int, device: torch.device) -> None:
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
def test_a_batch_made_up_for_a_capture_writes_nothing(
    num_sms: int, device: torch.device, sinks: bool
) -> None:
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


# --- torch's way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_without_a_way_of_their_own_get_heads_that_are_rotated(
    norm: bool, dtype: torch.dtype
) -> None:
    layout = Layout(requests=((3, 9), (1, 20)), group=3, num_kv_heads=2, dtype=dtype)
    one = case(layout, torch.device("cpu"), norm=norm)
    check_result(one, one.run(TorchPagedAttention()))


def test_rows_of_the_wrong_length_are_refused() -> None:
    one = case(Layout(requests=((3, 9),)), torch.device("cpu"))
    one.qkv = one.qkv[:, :-8]
    with pytest.raises(ConfigError, match=r"rows of 16 numbers.* make 24"):
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
    given |= {"max_keys": 4096, "num_sms": 132}
    return decode_tile_config(BatchShape(num_reqs, num_reqs, **{**given, **changed})).num_splits


def test_keys_are_split_to_fill_the_gpu_and_no_further() -> None:
    assert decode_splits(1) == MAX_COMBINED_SPLITS
    assert decode_splits(1, max_keys=100) == 4
    assert decode_splits(256) == 1


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
    mixes: list[tuple[tuple[int, int], ...]],
    num_tokens: int,
    rules: dict[str, Any],
) -> None:
    """Captured once, on a batch with no real token; replayed on others of its size."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: 8)  # decodes are split
    backend = TritonPagedAttention()

    def batch_of(mix: tuple[tuple[int, int], ...], seed: int) -> Case:
        return case(padded(mix, num_tokens, seed, **rules), device, min_blocks=48)

    static = batch_of(mixes[0], 0)
    static.batch.slot_mapping.fill_(-1)
    static.batch.block_table.fill_(0)
    static.positions.clamp_(max=3)
    decode = {"max_query_len": num_tokens // 4, "uniform_decode": num_tokens == 4}
    metadata = replace(static.metadata(backend), **decode)

    def step() -> Tensor:
        return static.run(backend, metadata)

    if device.type == "cuda":
        step()  # kernels are compiled and loaded by a first call
    captured = pool.capture(step)
    for seed, mix in enumerate(mixes):
        one = batch_of(mix, seed)
        for target, source in zip(static.tensors(), one.tensors(), strict=True):
            target.copy_(source)
        pool.replay(captured.tape)
        eager = one.run(backend, replace(one.metadata(backend), **decode))
        check_result(one, eager)
        assert_same_bits(captured.output, eager)
        assert_same_bits(static.batch.key_cache, one.batch.key_cache)
        assert_same_bits(static.batch.value_cache, one.batch.value_cache)


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
    """Its schema and its fake, as torch.compile will rely on them."""
    one = case(Layout(requests=((3, 2), (1, 7)), padding_tokens=1, sinks=True), device, norm=True)
    batch, rotary = one.batch, one.rotary
    out = torch.empty(*batch.query.shape[:2], batch.layout.value_dim, device=device)
    arguments = (one.qkv, one.positions, rotary.table, rotary.qk_norm, EPS)
    arguments += batch.arguments(out)[3:]
    torch.library.opcheck(
        torch.ops.ostinato.triton_qkv_attention.default,
        arguments,
        test_utils=["test_schema", "test_faketensor"],
    )
