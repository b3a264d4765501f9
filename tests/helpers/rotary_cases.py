"""Batches as raw QKV, for attention that applies RoPE itself.

The oracle rotates pairs as complex numbers in float64 and attends with the plain-torch operator,
which has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from paged_batches import Batch, Layout, Mix, assert_same_bits, build, padded
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention.base import AttentionBackend, AttentionMetadata, attend_qkv
from ostinato.attention.rope import RotaryEmbedding

EPS = 1e-5
MAX_POSITION = 400
FAR_AWAY = 1 << 40


@dataclass(kw_only=True)
class Case:
    """A batch by its raw QKV, and what must become of it."""

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
        weight = [] if self.rotary.qk_norm is None else [self.rotary.qk_norm]
        return [self.qkv, self.positions, *weight, *self.batch.tensors()[3:]]


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
    """The batch of ``layout`` as raw QKV; positions of padding are nowhere."""
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


def check_replays(
    pool: GraphPool,
    backend: AttentionBackend,
    mixes: Sequence[Mix],
    num_tokens: int,
    device: torch.device,
    *,
    norm: bool = False,
    **rules: Any,
) -> None:
    """Capture once, on a batch with no real token; replay on others of its size, bit for bit."""

    def batch_of(mix: Mix, seed: int) -> Case:
        return case(padded(mix, num_tokens, seed, **rules), device, norm=norm, min_blocks=48)

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
