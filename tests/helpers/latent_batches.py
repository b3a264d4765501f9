"""Batches of latent attention: inputs, cache and metadata, and a dense softmax in float64.

Whatever a request must not see is NaN, as in ``paged_batches``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from paged_batches import Layout, Mix, assert_same_bits, build
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.attention.latent import attend_latent
from ostinato.attention.latent_expansion import ExpansionRule, least_queries
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.ops.norm import Norm

EPS = 1e-6
SCALE = 0.2
MIX: Mix = ((3, 30), (1, 90), (7, 0), (1, 0), (2, 61))


def expand_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU too, expand wherever it saves operations: time only pays for large batches."""

    def rule(*shape: int) -> ExpansionRule | None:
        least = least_queries(*shape)
        return None if least is None else ExpansionRule(least, least)

    monkeypatch.setattr("ostinato.attention.triton_paged.gpu_rule", rule)


@dataclass(kw_only=True)
class Case:
    """A batch of latent attention: inputs, cache and metadata; what is expected of it."""

    layout: Layout
    spec: AttentionSpec
    inputs: list[Tensor]  # query, compressed
    embedding: LatentEmbedding
    positions: Tensor
    metadata: AttentionMetadata
    expected: Tensor
    rows: Tensor  # the new rows of the cache

    @property
    def cache(self) -> Tensor:
        return self.metadata.kv_caches[0][0]

    def tensors(self) -> list[Tensor]:
        """Everything that a graph would find at fixed addresses."""
        batch = self.metadata
        lengths = [batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping]
        return [*self.inputs, self.positions, self.cache, *lengths]

    def run(self, backend: AttentionBackend) -> Tensor:
        metadata = replace(self.metadata, backend=backend)
        with set_forward_context(attn_metadata=metadata):
            return attend_latent(self.spec, *self.inputs, self.embedding, self.positions)

    def check(self, backend: AttentionBackend) -> Tensor:
        before = self.cache.clone()
        out = self.run(backend)
        half = out.dtype is not torch.float32
        tolerance = 4 * torch.finfo(out.dtype).eps if half else 1e-5
        torch.testing.assert_close(
            out.cpu().double(), self.expected, rtol=tolerance, atol=tolerance
        )
        slots = self.metadata.slot_mapping
        kept = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device).flatten()
        kept[slots[slots >= 0]] = False
        new, old = self.cache.flatten(0, 1), before.flatten(0, 1)
        assert_same_bits(new[kept].contiguous(), old[kept].contiguous())
        stored = new[slots[slots >= 0], 0].cpu().double()
        torch.testing.assert_close(stored, self.rows, rtol=tolerance, atol=tolerance)
        return out


def make(
    layout: Layout,
    rope: int,
    device: torch.device,
    *,
    nope: int = 4,
    value: int = 6,
    decode: bool = False,
    min_blocks: int = 0,
) -> Case:
    """``layout``: head_dim is that of rows in the cache, value_dim the rank.

    ``nope`` and ``value`` are so few columns of heads that keys are expanded from few queries on.
    """
    batch = build(layout, device, min_blocks=min_blocks)
    rank, row, dtype = layout.value_dim, layout.head_dim, layout.dtype
    generator = torch.Generator().manual_seed(layout.seed + 1)
    num_tokens, num_real = batch.query.shape[0], sum(length for length, _ in layout.requests)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[:num_real] = torch.cat(
        [torch.arange(context, context + length) for length, context in layout.requests]
    )
    compressed = torch.randn(num_tokens, row, generator=generator).to(dtype)
    compressed[num_real:] = torch.nan
    generator.manual_seed(0)  # the model's own, whatever the batch
    angles = torch.rand(1024, rope // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    weight = (torch.rand(rank, generator=generator) + 0.5).to(dtype)
    up = torch.randn(layout.group, nope + value, rank, generator=generator) / rank**0.5
    up = up.to(dtype)
    query = batch.query[..., : nope + rope] * min(1.0, 4 / (nope + rope) ** 0.5)
    rows = _rows(compressed[:num_real].double(), weight.double(), table, positions[:num_real])
    cache = batch.key_cache
    metadata = replace(
        batch.metadata(), kv_caches=[(cache, cache[..., :rank])], uniform_decode=decode
    )
    return Case(
        layout=layout,
        spec=AttentionSpec(
            layer=0,
            num_heads=layout.group,
            num_kv_heads=1,
            head_dim=row,
            value_dim=rank,
            scale=SCALE,
            values_in_keys=True,
        ),
        # Slices of larger rows, as a model has them.
        inputs=[
            query,
            torch.cat((torch.zeros(num_tokens, 3), compressed), 1).to(dtype).to(device)[:, 3:],
        ],
        embedding=LatentEmbedding(
            table=table.to(device), norm=Norm(weight.to(device), EPS), up=up.to(device)
        ),
        positions=positions.to(device),
        metadata=metadata,
        expected=_oracle(
            layout, query.cpu().double(), up.double(), rows, batch.dense, table, positions
        ),
        rows=rows,
    )


def _rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + half) of the last dimension; ``x`` [T, ..., rope]."""
    cos, sin = table[positions].double().chunk(2, dim=-1)
    cos, sin = (a.view(-1, *[1] * (x.dim() - 2), a.shape[-1]) for a in (cos, sin))
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _rows(compressed: Tensor, weight: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    rank = weight.shape[0]
    latent = compressed[:, :rank]
    latent = latent / (latent.square().mean(1, keepdim=True) + EPS).sqrt() * weight
    return torch.cat((latent, _rotated(compressed[:, rank:], table, positions)), dim=1)


def _oracle(
    layout: Layout,
    query: Tensor,
    up: Tensor,
    rows: Tensor,
    dense: Any,
    table: Tensor,
    positions: Tensor,
) -> Tensor:
    """Over keys and values of every head."""
    rank, nope = layout.value_dim, query.shape[2] - table.shape[1]
    query = torch.cat((query[..., :nope], _rotated(query[..., nope:], table, positions)), dim=2)
    out = torch.zeros(*query.shape[:2], up.shape[1] - nope, dtype=torch.float64)
    token = 0
    for (length, context), (cached, _) in zip(layout.requests, dense, strict=False):
        row = torch.cat((cached[:context, 0].double(), rows[token : token + length]))
        heads = torch.einsum("kr,hnr->hkn", row[:, :rank], up)
        keys = torch.cat((heads[..., :nope], row[:, rank:].expand(len(up), -1, -1)), dim=2)
        for position in range(context, context + length):
            seen = slice(0, position + 1)
            weights = (torch.einsum("hd,hkd->hk", query[token], keys[:, seen]) * SCALE).softmax(1)
            out[token] = torch.einsum("hk,hkv->hv", weights, heads[:, seen, nope:])
            token += 1
    return out


def layout_of(heads: int, rank: int, rope: int, **rules: Any) -> Layout:
    options: dict[str, Any] = {
        "requests": MIX,
        "block_size": 16,
        "padding_requests": 2,
        "padding_tokens": 3,
    }
    return Layout(group=heads, head_dim=rank + rope, value_dim=rank, **{**options, **rules})


def padding_to(num_tokens: int, mix: Mix) -> dict[str, int]:
    """Of 4 requests."""
    missing = num_tokens - sum(length for length, _ in mix)
    return {"padding_requests": 4 - len(mix), "padding_tokens": missing}


def check_replays(
    backend: AttentionBackend,
    mixes: list[Mix],
    case: Callable[[Mix, int], Case],
    device: torch.device,
) -> None:
    static = case(mixes[0], 0)
    static.metadata.slot_mapping.fill_(-1)
    static.metadata.block_table.fill_(0)
    if device.type == "cuda":
        static.run(backend)  # kernels are compiled and loaded by a first call
    with GraphPool(device, lazy_capture=True) as pool:
        captured = pool.capture(lambda: static.run(backend))
        for seed, mix in enumerate(mixes):
            batch = case(mix, seed)
            for target, source in zip(static.tensors(), batch.tensors(), strict=True):
                target.copy_(source)
            pool.replay(captured.tape)
            assert_same_bits(captured.output, batch.check(backend))
            assert_same_bits(static.cache, batch.cache)
