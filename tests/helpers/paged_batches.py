"""Batches over a paged cache, by their numbers, and a dense softmax in float64 without pages.

Whatever a request must not see is NaN: unused cache slots, blocks that slid out of the window,
padding tokens, the output buffer. Unused entries of block tables point nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, attend
from ostinato.attention.reference.torch_paged import TorchPagedAttention

NOWHERE = 1 << 30
CPU = torch.device("cpu")

# (query_len, context_len) per request.
Mix = tuple[tuple[int, int], ...]
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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch by its numbers: (query_len, context_len) per request, then padding."""

    requests: Mix
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


def layouts(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Layout]:
    """Layouts of all kinds, with these fields drawn from strategies of the test's own."""
    common: dict[str, st.SearchStrategy[Any]] = {
        "num_kv_heads": st.sampled_from([1, 2]),
        "block_size": st.sampled_from([1, 4, 16]),
        "soft_cap": st.none() | st.sampled_from([0.5, 3.0]),
        "sinks": st.booleans(),
        "padding_requests": st.integers(0, 3),
        "padding_tokens": st.integers(0, 3),
        "seed": st.integers(0, 1 << 16),
    }
    return st.builds(Layout, **common | strategies)


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

    def arguments(self, out: Tensor | None = None) -> tuple[Any, ...]:
        if out is None:
            shape = (*self.query.shape[:2], self.layout.value_dim)
            out = torch.full(shape, torch.nan, dtype=self.query.dtype, device=self.query.device)
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
        arguments = self.arguments()
        body(*arguments)
        out: Tensor = arguments[5]
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

    order = torch.randperm(num_blocks - 1, generator=generator) + 1  # no request has block 0
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


def padded(mix: Mix, num_tokens: int, seed: int, **rules: Any) -> Layout:
    return Layout(
        requests=mix,
        padding_requests=4 - len(mix),
        padding_tokens=num_tokens - sum(query_len for query_len, _ in mix),
        seed=seed,
        **SHAPES | rules,
    )


def dummy(
    starts: list[int], seq_len: int, num_tokens: int, device: torch.device = CPU, **rules: Any
) -> Batch:
    """A batch as it is laid out for a capture: any lengths, no slots, tables of block 0 alone."""
    batch = build(Layout(requests=((num_tokens, 0),), **rules), device)
    num_reqs = len(starts) - 1
    batch.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    batch.seq_lens = torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device)
    batch.block_table = torch.zeros(num_reqs, 3, dtype=torch.int32, device=device)
    batch.slot_mapping.fill_(-1)
    batch.key_cache[:], batch.value_cache[:] = 1.0, 2.0
    return batch


def num_keyless(batch: Batch) -> int:
    """Tokens of a dummy batch without keys: those for which its tables have no room."""
    seq_len = int(batch.seq_lens[0])
    room = batch.block_table.shape[1] * batch.layout.block_size
    return max(0, seq_len - room) if seq_len else batch.query.shape[0]


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


def check_replays(
    pool: GraphPool,
    backend: AttentionBackend,
    operator: Callable[..., None],
    mixes: Sequence[Mix],
    num_tokens: int,
    device: torch.device,
    **rules: Any,
) -> None:
    """Capture once, on a batch with no real token; replay on others of its size, bit for bit."""
    static = build(padded(mixes[0], num_tokens, 0, **rules), device, min_blocks=32)
    static.max_seq_len = 128
    static.slot_mapping.fill_(-1)
    static.block_table.fill_(0)
    metadata, spec = replace(static.metadata(), backend=backend), static.spec()

    def step() -> Tensor:
        return forward(spec, static.query, static.key, static.value, metadata, static.sinks)

    if device.type == "cuda":
        step()  # kernels are compiled and loaded by a first call
    captured = pool.capture(step)
    for seed, mix in enumerate(mixes):
        batch = build(padded(mix, num_tokens, seed, **rules), device, min_blocks=32)
        for target, source in zip(static.tensors(), batch.tensors(), strict=True):
            target.copy_(source)
        pool.replay(captured.tape)
        eager = check(batch, operator)
        assert_same_bits(captured.output, eager)
        assert_same_bits(static.key_cache, batch.key_cache)
        assert_same_bits(static.value_cache, batch.value_cache)


def check_schema(operator: Any, arguments: tuple[Any, ...]) -> None:
    """An operator's schema and its fake, on which torch.compile relies."""
    torch.library.opcheck(operator, arguments, test_utils=["test_schema", "test_faketensor"])
