"""Decode attention, in one kernel or two, on a real GPU: bfloat16, layers in a row, graphs.

The interpreter, which other tests use, runs programs one after the other and no bfloat16. Here
they race for counters and memory, and each kernel begins before the last is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionMetadata, AttentionSpec, attend_qkv
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.tile_config import StreamRule
from ostinato.attention.triton_paged import TritonPagedAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
BLOCK_SIZE = 16
NUM_LAYERS = 2


@pytest.fixture(
    params=[None, StreamRule(0, 0), StreamRule(900, 0), StreamRule(0, 3)],
    ids=["one kernel", "stream", "long ones stream", "uneven ones stream"],
    autouse=True,
)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Which kernels compute decode batches in half precision."""
    monkeypatch.setattr(triton_paged, "stream_rule", lambda _: request.param)
    return request.param is not None


@dataclass(kw_only=True)
class Stack:
    """Layers whose result becomes the next one's QKV, over caches full of NaN."""

    specs: list[AttentionSpec]
    metadata: AttentionMetadata
    rotary: RotaryEmbedding
    qkv: Tensor
    positions: Tensor
    sinks: Tensor | None

    def run(self) -> Tensor:
        qkv = self.qkv
        with set_forward_context(attn_metadata=self.metadata):
            for spec in self.specs:
                out = attend_qkv(spec, qkv, self.rotary, self.positions, self.sinks)
                # Anything that reads the result and makes the next QKV of it.
                qkv = (qkv + out.flatten(1).repeat(1, 3)[:, : qkv.shape[1]]) * 0.7
        return out


def stack(
    lens: list[tuple[int, int]],
    *,
    dtype: torch.dtype,
    group: int = 4,
    num_kv_heads: int = 8,
    head_dim: int = 64,
    norm: bool = False,
    sinks: bool = False,
    max_keys: int = 4096,
    max_tokens: int | None = None,
    seed: int = 0,
    **rules: Any,
) -> Stack:
    """(query_len, context) per request; (0, 0) is padding. Older keys are random."""
    torch.manual_seed(seed)
    num_heads = group * num_kv_heads
    width = max_keys // BLOCK_SIZE
    num_tokens = max_tokens or sum(max(1, query_len) for query_len, _ in lens)
    num_blocks = len(lens) * width + 1
    table = torch.full((len(lens), width), 1 << 29, dtype=torch.int32)
    order = (torch.randperm(num_blocks - 1) + 1).int().view(len(lens), width)
    slots, positions = torch.full((num_tokens,), -1), torch.zeros(num_tokens, dtype=torch.int64)
    caches = []
    for _ in range(NUM_LAYERS):
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        caches.append(tuple(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    token = 0
    for request, (query_len, context) in enumerate(lens):
        used = -(-(query_len + context) // BLOCK_SIZE)
        table[request, :used] = order[request, :used]
        position = torch.arange(query_len + context)
        slot = table[request, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        for cache in (cache for layer in caches for cache in layer):
            rows = torch.randn(context, num_kv_heads, head_dim).to(dtype)
            cache.flatten(0, 1)[slot[:context]] = rows
        slots[token : token + query_len] = slot[context:]
        positions[token : token + query_len] = position[context:]
        token += query_len
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    qkv[token:] = torch.nan
    angles = torch.outer(torch.arange(float(max_keys)), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
    weight = torch.rand(num_heads + num_kv_heads, head_dim).to(dtype) + 0.5
    starts = torch.tensor([0, *[query_len for query_len, _ in lens]]).cumsum(0).int()
    seq_lens = torch.tensor([sum(pair) for pair in lens], dtype=torch.int32)
    return Stack(
        specs=[
            AttentionSpec(
                layer=layer,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=head_dim,
                scale=head_dim**-0.5,
                **rules,
            )
            for layer in range(NUM_LAYERS)
        ],
        metadata=AttentionMetadata(
            query_start_loc=starts.to(CUDA),
            seq_lens=seq_lens.to(CUDA),
            block_table=table.to(CUDA),
            slot_mapping=slots.to(CUDA),
            max_query_len=max(1, *[query_len for query_len, _ in lens]),
            max_seq_len=max_keys,
            kv_caches=[(keys.to(CUDA), values.to(CUDA)) for keys, values in caches],
            backend=TritonPagedAttention(),
            uniform_decode=len(lens) == len(slots) and max(query_len for query_len, _ in lens) <= 1,
        ),
        rotary=RotaryEmbedding(
            table=torch.cat((angles.cos(), angles.sin()), dim=-1).to(CUDA),
            qk_norm=weight.to(CUDA) if norm else None,
            eps=1e-6,
        ),
        qkv=qkv.to(CUDA),
        positions=positions.to(CUDA),
        sinks=torch.randn(num_heads).to(dtype).to(CUDA) if sinks else None,
    )


def tensors(stack: Stack) -> list[Tensor]:
    metadata = stack.metadata
    caches = [cache for layer in metadata.kv_caches for cache in layer]
    return [
        stack.qkv,
        stack.positions,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        metadata.slot_mapping,
        *caches,
    ]


def reference(stack: Stack) -> Stack:
    """The same batch for the plain-torch backend, in caches of its own."""
    caches = [(keys.clone(), values.clone()) for keys, values in stack.metadata.kv_caches]
    metadata = replace(stack.metadata, backend=TorchPagedAttention(), kv_caches=caches)
    return replace(stack, metadata=metadata)


def check(ours: Stack, out: Tensor, theirs: Stack) -> None:
    expected = theirs.run()
    tolerance = 1e-4 if out.dtype is torch.float32 else 0.03
    num_real = int(ours.metadata.query_start_loc[-1])
    torch.testing.assert_close(out[:num_real], expected[:num_real], rtol=tolerance, atol=tolerance)
    assert not out[num_real:].any()
    assert out.isfinite().all()
    caches = zip(ours.metadata.kv_caches, theirs.metadata.kv_caches, strict=True)
    for layer, pair in enumerate(caches):
        # The first layer has the same input on both sides; its keys differ by rounding alone.
        near = tolerance if layer else max(1e-5, 2 * torch.finfo(out.dtype).eps)
        for cache, right in zip(*pair, strict=True):
            torch.testing.assert_close(cache, right, rtol=near, atol=near, equal_nan=True)


DECODE = [(1, 999), (1, 0), (1, 31), (1, 32), (1, 2500), (0, 0)]
MIXED = [(7, 300), (1, 0), (1, 999), (130, 3), (1, 64)]
SHAPES: list[dict[str, Any]] = [
    {},
    {"head_dim": 128, "norm": True},
    {"group": 3, "num_kv_heads": 3},
    {"group": 1, "num_kv_heads": 2, "head_dim": 80},
    {"group": 8, "num_kv_heads": 2, "head_dim": 256, "norm": True},
    {"window": 100, "sinks": True, "soft_cap": 5.0},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_layers_in_a_row(
    lens: list[tuple[int, int]], shape: dict[str, Any], dtype: torch.dtype, streams: bool
) -> None:
    if streams and (lens is MIXED or dtype is torch.float32):
        pytest.skip("the same kernels as without")
    ours = stack(lens, dtype=dtype, **shape)
    theirs = reference(ours)
    check(ours, ours.run(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_reqs", [1, 5, 24])
def test_a_graph_replayed_with_other_lengths(
    num_reqs: int, dtype: torch.dtype, streams: bool
) -> None:
    """Captured with next to no keys, replayed with many; equal to the eager call to the bit."""
    if streams and dtype is torch.float32:
        pytest.skip("the same kernels as without")
    short = [(1, 0)] * num_reqs
    static = stack(short, dtype=dtype, max_keys=2048)
    with GraphPool(CUDA, lazy_capture=True) as pool:
        static.run()  # kernels are compiled and loaded by a first call
        captured = pool.capture(static.run)
        for seed in range(6):
            torch.manual_seed(seed)
            lens = [(1, int(n)) for n in torch.randint(0, (2000, 800)[seed // 3], (num_reqs,))]
            if seed % 2:
                lens[num_reqs // 2 :] = [(0, 0)] * (num_reqs - num_reqs // 2)
            one = stack(lens, dtype=dtype, max_keys=2048, max_tokens=num_reqs, seed=seed)
            theirs = reference(one)
            for target, source in zip(tensors(static), tensors(one), strict=True):
                target.copy_(source)
            pool.replay(captured.tape)
            out = captured.output.clone()
            eager = one.run()
            assert torch.equal(out, eager)
            for mine, other in zip(tensors(static), tensors(one), strict=True):
                assert torch.equal(mine.nan_to_num(7), other.nan_to_num(7))
            check(one, eager, theirs)


def test_the_same_result_a_thousand_times() -> None:
    """Any program may finish last; the parts are combined in one order."""
    static = stack([(1, 2000), (1, 700)], dtype=torch.bfloat16)
    first = static.run()
    with GraphPool(CUDA, lazy_capture=True) as pool:
        captured = pool.capture(static.run)
        for _ in range(1000):
            pool.replay(captured.tape)
            assert torch.equal(captured.output, first)
