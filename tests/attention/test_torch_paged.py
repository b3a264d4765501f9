"""Paged attention in plain torch, held against a dense softmax in float64 that knows no pages.

Whatever a request must not see is NaN: unused cache slots, blocks that slid out of the window,
padding tokens, the output buffer. Unused entries of block tables point nowhere. Both bodies of the
operator are tested on the CPU, and with them the backend that Numba compiles; what takes the
``device`` fixture runs the real one on CUDA too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import numba_paged, paged_cpu, paged_cuda
from ostinato.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    attend,
)
from ostinato.attention.numba_paged import NumbaPagedAttention
from ostinato.attention.paged import PagedBatch, over_heads
from ostinato.attention.torch_paged import TorchPagedAttention
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.numba import has_numba

NOWHERE = 1 << 30
CPU = torch.device("cpu")

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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch by its numbers: (query_len, context_len) per request, then padding."""

    requests: tuple[tuple[int, int], ...]
    group: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    padding_requests: int = 0
    padding_tokens: int = 0
    consecutive_blocks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(kw_only=True)
class Batch:
    """The operator's arguments, and the same numbers without pages for the oracle."""

    layout: Layout
    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    sinks: Tensor | None
    max_seq_len: int
    dense: list[tuple[Tensor, Tensor]]  # all keys and values of each request

    @property
    def scale(self) -> float:
        return 0.3

    def tensors(self) -> list[Tensor]:
        """Everything that a graph would find at fixed addresses."""
        fixed = [self.query, self.key, self.value, self.key_cache, self.value_cache]
        fixed += [self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping]
        return fixed if self.sinks is None else [*fixed, self.sinks]

    def arguments(self, out: Tensor) -> tuple[Any, ...]:
        return (
            *self.tensors()[:5],
            out,
            *self.tensors()[5:9],
            self.sinks,
            self.scale,
            self.layout.window,
            self.layout.soft_cap,
            self.max_seq_len,
            False,
        )

    def run(self, body: Callable[..., None]) -> Tensor:
        shape = (self.query.shape[0], self.query.shape[1], self.layout.value_dim)
        out = torch.full(shape, torch.nan, dtype=self.query.dtype, device=self.query.device)
        body(*self.arguments(out))
        return out

    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            max_query_len=1,  # not to be relied on
            max_seq_len=self.max_seq_len,
            kv_caches=[(self.key_cache, self.value_cache)],
            backend=TorchPagedAttention(),
        )

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            layer=0,
            num_heads=self.query.shape[1],
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            value_dim=self.layout.value_dim,
            scale=self.scale,
            window=self.layout.window,
            soft_cap=self.layout.soft_cap,
        )


def build(layout: Layout, device: torch.device = CPU, *, min_blocks: int = 0) -> Batch:
    """The batch in a poisoned cache. ``min_blocks``: for caches and tables of equal shape."""
    generator = torch.Generator().manual_seed(layout.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(layout.dtype)

    block_size = layout.block_size
    query_lens = [query_len for query_len, _ in layout.requests] + [0] * layout.padding_requests
    seq_lens = [sum(request) for request in layout.requests] + [0] * layout.padding_requests
    num_real = sum(query_lens)
    num_tokens = num_real + layout.padding_tokens
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = max(min_blocks, sum(blocks_of)) + 3
    width = max(min_blocks, *blocks_of) + 1

    kv_shapes = [(layout.num_kv_heads, dim) for dim in (layout.head_dim, layout.value_dim)]
    caches = [
        torch.full((num_blocks, block_size, *s), torch.nan).to(layout.dtype) for s in kv_shapes
    ]
    dense = [tuple(normal(seq_len, *shape) for shape in kv_shapes) for seq_len in seq_lens]
    query = normal(num_tokens, layout.num_kv_heads * layout.group, layout.head_dim)
    news = [torch.full((num_tokens, *shape), torch.nan).to(layout.dtype) for shape in kv_shapes]
    query[num_real:] = torch.nan
    table = torch.full((len(seq_lens), width), NOWHERE, dtype=torch.int32)
    slot_mapping = torch.full((num_tokens,), -1)

    order = torch.randperm(num_blocks - 1, generator=generator) + 1  # block 0 is nobody's
    free = iter(sorted(order.tolist()) if layout.consecutive_blocks else order.tolist())
    token = 0
    for request, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        blocks = torch.tensor([next(free) for _ in range(blocks_of[request])], dtype=torch.long)
        positions = torch.arange(seq_len)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        context = seq_len - query_len
        visible_from = 0 if layout.window is None else max(0, context - layout.window + 1)
        table[request, visible_from // block_size : len(blocks)] = blocks[
            visible_from // block_size :
        ].int()
        for cache, new, old in zip(caches, news, dense[request], strict=True):
            cache.flatten(0, 1)[slots[visible_from:context]] = old[visible_from:context]
            new[token : token + query_len] = old[context:]
        slot_mapping[token : token + query_len] = slots[context:]
        token += query_len

    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    sinks = normal(query.shape[1]) if layout.sinks else None
    return Batch(
        layout=layout,
        query=query.to(device),
        key=news[0].to(device),
        value=news[1].to(device),
        key_cache=caches[0].to(device),
        value_cache=caches[1].to(device),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
        block_table=table.to(device),
        slot_mapping=slot_mapping.to(device),
        sinks=None if sinks is None else sinks.to(device),
        max_seq_len=max(1, *seq_lens),
        dense=[(keys, values) for keys, values in dense],
    )


def oracle(batch: Batch) -> Tensor:
    """Softmax attention in float64, one request and one query at a time."""
    layout = batch.layout
    query = batch.query.cpu().double()
    out = torch.zeros(*query.shape[:2], layout.value_dim, dtype=torch.float64)
    token = 0
    for (query_len, context), (keys, values) in zip(layout.requests, batch.dense, strict=False):
        for position in range(context, context + query_len):
            first = 0 if layout.window is None else max(0, position - layout.window + 1)
            k = keys[first : position + 1].double().repeat_interleave(layout.group, 1)
            v = values[first : position + 1].double().repeat_interleave(layout.group, 1)
            scores = torch.einsum("hd,khd->hk", query[token], k) * batch.scale
            if layout.soft_cap is not None:
                scores = layout.soft_cap * torch.tanh(scores / layout.soft_cap)
            weights = scores.exp()
            total = weights.sum(1)
            if batch.sinks is not None:
                total = total + batch.sinks.cpu().double().exp()
            out[token] = torch.einsum("hk,khd->hd", weights, v) / total[:, None]
            token += 1
    return out


def expected_caches(batch: Batch) -> list[Tensor]:
    """The caches after the batch: its own slots written, not a bit changed elsewhere."""
    caches = []
    for cache, new in ((batch.key_cache, batch.key), (batch.value_cache, batch.value)):
        cache = cache.clone()
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
        caches.append(cache)
    return caches


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    integers = {2: torch.int16, 4: torch.int32}[actual.itemsize]
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual.view(integers), expected.view(integers), rtol=0, atol=0)


def check(batch: Batch, body: Callable[..., None]) -> Tensor:
    """Run the batch: right results, zeros for padding, a cache written where it should be."""
    caches = expected_caches(batch)
    out = batch.run(body)
    tolerance = 1e-5 if out.dtype is torch.float32 else 2 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.cpu().double(), oracle(batch), rtol=tolerance, atol=tolerance)
    assert_same_bits(batch.key_cache, caches[0])
    assert_same_bits(batch.value_cache, caches[1])
    return out


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
layouts = st.builds(
    Layout,
    requests=requests.map(tuple),
    group=st.sampled_from([1, 2, 3]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 24]),
    value_dim=st.sampled_from([8, 16, 24]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 20),
    soft_cap=st.none() | st.sampled_from([0.5, 3.0]),
    sinks=st.booleans(),
    padding_requests=st.integers(0, 3),
    padding_tokens=st.integers(0, 3),
    consecutive_blocks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1 << 16),
)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@any_body
@given(layout=layouts)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_is_the_dense_softmax(
    short_steps: None, body: Callable[..., None], layout: Layout
) -> None:
    check(build(layout), body)


@given(layout=layouts)
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
@given(layout=layouts)
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
@given(layout=layouts)
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


# --- batches that nobody sent ---------------------------------------------------------------------


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
def test_a_made_up_batch_writes_nothing(
    body: Callable[..., None], starts: list[int], seq_len: int, num_tokens: int
) -> None:
    batch = build(Layout(requests=((num_tokens, 0),)))
    num_reqs = len(starts) - 1
    batch.query_start_loc = torch.tensor(starts, dtype=torch.int32)
    batch.seq_lens = torch.full((num_reqs,), seq_len, dtype=torch.int32)
    batch.block_table = torch.zeros(num_reqs, 3, dtype=torch.int32)
    batch.slot_mapping = torch.full((num_tokens,), -1)
    batch.key_cache[:], batch.value_cache[:] = 1.0, 2.0
    caches = expected_caches(batch)
    out = batch.run(body)
    assert_same_bits(batch.key_cache, caches[0])
    assert_same_bits(batch.value_cache, caches[1])
    assert out.isfinite().all()
    keyless = max(0, seq_len - 3 * batch.layout.block_size) if seq_len else num_tokens
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

SHAPES = {"group": 3, "num_kv_heads": 2, "block_size": 4}
DECODES = [  # four requests, four tokens
    ((1, 9), (1, 0), (1, 3), (1, 20)),
    ((1, 30), (1, 1)),
    ((1, 7), (1, 8), (1, 9)),
]
MIXES = [  # four requests, twelve tokens
    ((12, 0),),
    ((1, 9), (1, 0), (7, 2), (3, 3)),
    ((1, 30), (11, 13)),
    ((5, 16), (2, 0)),
]


def padded(mix: tuple[tuple[int, int], ...], num_tokens: int, seed: int, **rules: Any) -> Layout:
    return Layout(
        requests=mix,
        padding_requests=4 - len(mix),
        padding_tokens=num_tokens - sum(query_len for query_len, _ in mix),
        seed=seed,
        **SHAPES,
        **rules,
    )


@pytest.mark.parametrize(("mixes", "num_tokens"), [(DECODES, 4), (MIXES, 12)])
@pytest.mark.parametrize(
    "rules", [{}, {"window": 5}, {"sinks": True, "soft_cap": 2.0}], ids=["plain", "window", "sinks"]
)
def test_replay_equals_eager_bit_for_bit(
    pool: GraphPool,
    device: torch.device,
    mixes: list[tuple[tuple[int, int], ...]],
    num_tokens: int,
    rules: dict[str, Any],
) -> None:
    """Captured once, on a batch with no real token; replayed on others of its size."""
    static = build(padded(mixes[0], num_tokens, 0, **rules), device, min_blocks=16)
    static.max_seq_len = 64
    static.slot_mapping.fill_(-1)
    static.block_table.fill_(0)
    metadata, spec = static.metadata(), static.spec()

    def step() -> Tensor:
        return forward(spec, static.query, static.key, static.value, metadata, static.sinks)

    if device.type == "cuda":
        step()  # libraries want a first call
    captured = pool.capture(step)
    for seed, mix in enumerate(mixes):
        batch = build(padded(mix, num_tokens, seed, **rules), device, min_blocks=16)
        for target, source in zip(static.tensors(), batch.tensors(), strict=True):
            target.copy_(source)
        pool.replay(captured.tape)
        eager = check(batch, operator)
        assert_same_bits(captured.output, eager)
        assert_same_bits(static.key_cache, batch.key_cache)
        assert_same_bits(static.value_cache, batch.value_cache)


# --- the operator and the backend -----------------------------------------------------------------


def forward(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    sinks: Tensor | None = None,
) -> Tensor:
    """The way a model's layer calls it."""
    with set_forward_context(attn_metadata=metadata):
        return attend(spec, query, key, value, sinks)


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
    out = torch.empty(*batch.query.shape[:2], batch.layout.value_dim, device=device)
    torch.library.opcheck(
        operator, batch.arguments(out), test_utils=["test_schema", "test_faketensor"]
    )
