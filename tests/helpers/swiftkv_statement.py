"""A plain reference of SwiftKV, built from transformers' parts: no pages, batches or selection.

Every token of one request goes through all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass
class Stated:
    """Logits [T, V], and keys and values [T, num_kv_heads, head_dim] per layer, of one request."""

    logits: Tensor
    caches: list[tuple[Tensor, Tensor]]


class Statement:
    """``weights`` by the names of a SwiftKV checkpoint."""

    def __init__(self, config: Any, weights: dict[str, Tensor], num_early: int) -> None:
        self.config, self.weights, self.num_early = config, weights, num_early

    def weight(self, name: str) -> Tensor:
        return self.weights[f"model.{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
            * (self.weight(name))
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(name), self.weights.get(f"model.{name}.bias"))

    def heads(self, x: Tensor, layer: str, kind: str, suffix: str) -> Tensor:
        """[heads, T, head_dim]."""
        heads = self.linear(x, f"{layer}.self_attn.{kind}_proj{suffix}")
        heads = heads.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        norm = f"{layer}.self_attn.{kind}_norm"
        return self.norm(heads, norm) if f"model.{norm}.weight" in self.weights else heads

    @property
    def head_dim(self) -> int:
        given: int | None = getattr(self.config, "head_dim", None)
        return given or self.config.hidden_size // self.config.num_attention_heads

    @torch.no_grad()
    def run(self, tokens: Sequence[int]) -> Stated:
        device = self.weight("embed_tokens").device
        positions = torch.arange(len(tokens), device=device)
        hidden = F.embedding(torch.tensor(tokens, device=device), self.weight("embed_tokens"))
        rotary = LlamaRotaryEmbedding(self.config).to(device)
        cos, sin = rotary(hidden, positions[None])
        distance = positions[:, None] - positions
        window = getattr(self.config, "sliding_window", None) or len(tokens)
        seen = (distance >= 0) & (distance < window)
        caches, source = [], hidden
        for index in range(self.config.num_hidden_layers):
            layer, late = f"layers.{index}", index >= self.num_early
            if index == self.num_early:
                source = self.norm(hidden, "norm_swiftkv")
            x = self.norm(hidden, f"{layer}.input_layernorm")
            suffix = "_swiftkv" if late else ""
            query = self.heads(x, layer, "q", suffix)
            key = self.heads(source if late else x, layer, "k", suffix)
            value = self.heads(source if late else x, layer, "v", suffix)
            query, key = (t[0] for t in apply_rotary_pos_emb(query[None], key[None], cos, sin))
            caches.append((key.transpose(0, 1), value.transpose(0, 1)))
            mixed = F.scaled_dot_product_attention(
                query[None], key[None], value[None], seen, enable_gqa=True
            )[0]
            mixed = mixed.transpose(0, 1).flatten(1)
            hidden = hidden + self.linear(mixed, f"{layer}.self_attn.o_proj")
            x = self.norm(hidden, f"{layer}.post_attention_layernorm")
            gate, up = (self.linear(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            hidden = hidden + self.linear(F.silu(gate) * up, f"{layer}.mlp.down_proj")
        head = self.weights.get("lm_head.weight", self.weight("embed_tokens"))
        return Stated(F.linear(self.norm(hidden, "norm"), head), caches)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely tokens after ``prompt``. None is a close call."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            best = self.run(tokens).logits[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "rounding could decide this"
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :]


def untrained(weights: dict[str, Tensor], num_early: int, num_layers: int) -> dict[str, Tensor]:
    """A plain decoder's weights under a SwiftKV checkpoint's names: the start of training."""
    weights = dict(weights)
    for index in range(num_early, num_layers):
        for kind in "qkv":
            module = f"model.layers.{index}.self_attn.{kind}_proj"
            for part in ("weight", "bias"):
                if f"{module}.{part}" in weights:
                    weights[f"{module}_swiftkv.{part}"] = weights[f"{module}.{part}"]
    if num_early < num_layers:
        first = weights[f"model.layers.{num_early}.input_layernorm.weight"]
        weights["model.norm_swiftkv.weight"] = first
    return weights
