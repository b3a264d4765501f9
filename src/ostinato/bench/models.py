"""Small models in plain torch, for measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DecoderLayer(nn.Module):
    """One Llama-shaped layer for single-token decode against a fixed KV cache."""

    def __init__(self, width: int, heads: int, kv_heads: int, mlp: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        rows, size = x.shape[0], self.head_size
        widths = [self.heads * size, self.kv_heads * size, self.kv_heads * size]
        q, k, v = self.qkv(self.norm1(x)).split(widths, dim=-1)
        q = rotate(q.view(rows, self.heads, size), cos, sin)
        # The new token goes into the last position of its row's cache.
        cache[0, :rows, :, -1] = rotate(k.view(rows, self.kv_heads, size), cos, sin)
        cache[1, :rows, :, -1] = v.view(rows, self.kv_heads, size)
        keys, values = cache[:, :rows]
        attended = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        x = torch.add(x, self.out(attended.reshape(rows, -1)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return torch.add(x, self.down(F.silu(gate) * up))


class Decoder(nn.Module):
    """Maps token ids and positions to logits; shaped like SmolLM2-135M by default."""

    def __init__(
        self,
        *,
        layers: int = 30,
        width: int = 576,
        heads: int = 9,
        kv_heads: int = 3,
        mlp: int = 1536,
        vocabulary: int = 49152,
        max_rows: int = 16,
        context: int = 64,
    ) -> None:
        super().__init__()
        size = width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, heads, kv_heads, mlp) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        caches = torch.randn(layers, 2, max_rows, kv_heads, context, size)
        self.register_buffer("caches", caches)
        frequencies = 10000 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies)
        self.caches: torch.Tensor
        self.frequencies: torch.Tensor

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embedding(ids)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer(x, cos, sin, cache)
        return F.linear(self.norm(x), self.embedding.weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Encoder(nn.Module):
    """A small pre-norm transformer over [batch, tokens, width]."""

    def __init__(self, *, layers: int = 6, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            qkv = layer["qkv"](layer["norm1"](x)).view(batch, tokens, 3, self.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)
            x = x + layer["out"](attended.transpose(1, 2).reshape(batch, tokens, width))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return x
