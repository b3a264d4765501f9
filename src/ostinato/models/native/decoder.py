"""The native decoder: one dense transformer for Llama, Mistral, Qwen2, Qwen3 and their kin.

Inference only, over a flat row of tokens, with few operators per layer: queries, keys and values
come from one matrix product, gate and up from another, and queries and keys are rotated together.
On CUDA, and on a CPU with compiled kernels, a layer is made of fused operators; elsewhere, and for
torch.compile, which fuses by itself, it is written out. What differs between the families is in
``DecoderConfig``; loading weights is in ``load.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.attention.base import AttentionSpec, attend, attend_qkv
from ostinato.attention.rotation import Rotation, angles_at, rotate
from ostinato.errors import ConfigError
from ostinato.models.base import CausalLM
from ostinato.models.native.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.norm import RMSNorm
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.activation import silu_and_mul
from ostinato.ops.linear import Norm, linear
from ostinato.ops.norm import add_rms_norm, rms_norm
from ostinato.ops.numba import runs_compiled
from ostinato.ops.parts import product_in_parts
from ostinato.ops.tuning import MAX_ROWS


class DecoderLayer(nn.Module):
    """One block: attention, then SwiGLU, each behind a norm and added to its input."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        exchange: Exchange = ALONE,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.windows[layer],
        )
        self._head_counts = (config.num_heads, config.num_kv_heads)
        hidden, rms_norm_eps = config.hidden_size, config.rms_norm_eps
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return _empty_linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(*shape: int) -> RMSNorm:
            return RMSNorm(shape, rms_norm_eps, device=device, dtype=dtype)

        self.input_norm = norm(hidden)
        self.qkv_proj = linear(hidden, queries + 2 * keys, config.qkv_bias)
        self.qk_norm = norm(sum(self._head_counts), config.head_dim) if config.qk_norm else None
        self.o_proj = linear(queries, hidden, config.output_bias)
        self.post_attention_norm = norm(hidden)
        self.gate_up_proj = linear(hidden, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, hidden, config.mlp_bias)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> torch.Tensor:
        mixed = self._attention(self.input_norm(hidden), cos, signed_sin)
        hidden = hidden + self.exchange.sum(self.o_proj(mixed.flatten(1)))
        gate, up = self.gate_up_proj(self.post_attention_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.exchange.sum(self.down_proj(F.silu(gate) * up))

    def forward_few(
        self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """The same for few tokens, in five operators; ``table`` is the model's table of angles.

        ``positions`` are those of all tokens that attention sees, if they are split over ranks. Not
        where products are summed over ranks, since the residual is inside of them.
        """
        qkv = _apply(self.qkv_proj, hidden, norm=self.input_norm)
        hidden = _apply(self.o_proj, self._mix(qkv, positions, table), residual=hidden)
        gated = _apply(self.gate_up_proj, hidden, norm=self.post_attention_norm, gated=True)
        return _apply(self.down_proj, gated, residual=hidden)

    def forward_many(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for many tokens, as products of torch and small operators between them.

        ``delta`` is what the layer before has still to add to ``hidden``, perhaps in parts; this
        layer's is returned beside the new ``hidden``. So every sum is made by the norm that reads
        it. ``positions`` as in ``forward_few``.
        """
        normed, hidden = _add_and_norm(self.input_norm, delta, hidden)
        qkv = F.linear(normed, self.qkv_proj.weight, self.qkv_proj.bias)
        delta = self._in_parts(self.o_proj, self._mix(qkv, positions, table))
        normed, hidden = _add_and_norm(self.post_attention_norm, delta, hidden)
        gate_up = F.linear(normed, self.gate_up_proj.weight, self.gate_up_proj.bias)
        delta = self._in_parts(self.down_proj, silu_and_mul(gate_up))
        return hidden, delta

    def _in_parts(self, projection: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A product that a norm will add to something, whole or in parts."""
        bias: torch.Tensor | None = projection.bias
        if bias is not None or self.exchange is not ALONE:
            return self.exchange.sum(projection(x))
        return product_in_parts(x, projection.weight)

    def _mix(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Attention from the raw product, as the next product takes it."""
        qkv = self.exchange.qkv_for_heads(qkv, *self._head_counts)
        qk_norm: torch.Tensor | None = None if self.qk_norm is None else self.qk_norm.weight
        num_heads, spec = self._head_counts[0], self.spec
        if qk_norm is not None and spec.num_heads < num_heads:
            # Attention has a part of these heads. All queries have one weight, and all keys.
            qk_norm = qk_norm[num_heads - spec.num_heads : num_heads + spec.num_kv_heads]
        rotation = Rotation(table=table, qk_norm=qk_norm, eps=self.input_norm.eps)
        mixed = attend_qkv(self.spec, qkv, rotation, positions)
        return self.exchange.heads_for_tokens(mixed).flatten(1)

    def _attention(
        self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self._head_counts
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.spec.head_dim))
        queries_keys, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self.qk_norm is not None:
            queries_keys = self.qk_norm(queries_keys)
        query, key = rotate(queries_keys, cos, signed_sin).split(self._head_counts, dim=1)
        query, key, value = self.exchange.tokens_for_heads(query, key, value)
        return self.exchange.heads_for_tokens(attend(self.spec, query, key, value))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The layer's tensors as checkpoints name them."""
        num_heads, num_kv_heads = self._head_counts
        head_dim = self.spec.head_dim
        sizes = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim}
        sizes["v"] = sizes["k"]
        qkv = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
        half = self.down_proj.in_features
        yield from _linear_slots(prefix, self.qkv_proj, qkv)
        yield from _linear_slots(
            prefix, self.o_proj, {"self_attn.o_proj": self.o_proj.out_features}
        )
        yield from _linear_slots(
            prefix, self.gate_up_proj, {"mlp.gate_proj": half, "mlp.up_proj": half}
        )
        yield from _linear_slots(
            prefix, self.down_proj, {"mlp.down_proj": self.down_proj.out_features}
        )
        yield _slot(f"{prefix}.input_layernorm.weight", self.input_norm.weight)
        yield _slot(f"{prefix}.post_attention_layernorm.weight", self.post_attention_norm.weight)
        if self.qk_norm is not None:  # one weight for all heads, repeated for each
            per_head = self.qk_norm.weight.detach().split(self._head_counts)
            for name, target in zip(("q_norm", "k_norm"), per_head, strict=True):
                shape = torch.Size([head_dim])
                yield WeightSlot(f"{prefix}.self_attn.{name}.weight", target, shape)


class Decoder(nn.Module, CausalLM):
    """A ``CausalLM``. Its parameters hold no values until they are loaded or drawn.

    ``max_position`` limits the table of angles to the sequences that will be run; the default is
    the model's own limit. The device may be ``meta``, to count parameters without memory.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int | None = None,
        exchange: Exchange = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position = _checked_max_position(config, max_position)
        self.dtype = dtype
        self.device = device
        self.embed_tokens = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype),
        ).requires_grad_(False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, device=device, dtype=dtype, exchange=exchange)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head = (
            None
            if config.tied_head
            else _empty_linear(
                config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
            )
        )
        # float32 whatever the dtype: a position of 100,000 does not exist in bfloat16.
        table = config.rotary.table(self.max_position, device)
        self.register_buffer("rotary_table", table, persistent=False)
        self.rotary_table: torch.Tensor
        self.attention_specs: Sequence[AttentionSpec] = [
            layer.spec for layer in self.decoder_layers()
        ]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens ``input_ids`` at ``positions``.

        They are not normed: the last norm is part of the head, which few tokens go through.
        """
        hidden = F.embedding(input_ids, self.embed_tokens.weight)
        if self._runs_fused(hidden):
            return self._forward_fused(hidden, positions)
        return self._forward_plain(hidden, positions)

    def _runs_fused(self, hidden: torch.Tensor) -> bool:
        # Compilers fuse by themselves.
        return not torch.compiler.is_compiling() and (hidden.is_cuda or runs_compiled(hidden))

    def _forward_plain(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, signed_sin = angles_at(self.rotary_table, positions, self.dtype)
        for layer in self.decoder_layers():
            hidden = layer(hidden, cos, signed_sin)
        return hidden

    def _forward_fused(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        table = self.rotary_table
        if hidden.shape[0] <= MAX_ROWS and self.dtype is not torch.float32:
            for layer in self.decoder_layers():
                hidden = layer.forward_few(hidden, positions, table)
            return hidden
        delta: torch.Tensor | None = None
        for layer in self.decoder_layers():
            hidden, delta = layer.forward_many(hidden, delta, positions, table)
        if delta is None:
            return hidden
        return hidden + (delta.sum(0) if delta.dim() > hidden.dim() else delta)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] of hidden states [B, hidden_size]."""
        if hidden.is_cuda:
            return linear(hidden, self.head_weight, norm=Norm(self.norm.weight, self.norm.eps))
        return F.linear(self.norm(hidden), self.head_weight)

    @property
    def head_weight(self) -> torch.Tensor:
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that a checkpoint of this model must have, and where it goes."""
        yield _slot("model.embed_tokens.weight", self.embed_tokens.weight)
        for index, layer in enumerate(self.decoder_layers()):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield _slot("model.norm.weight", self.norm.weight)
        if self.lm_head is not None:
            yield _slot("lm_head.weight", self.lm_head.weight)

    def ignored_names(self) -> list[str]:
        """Tensors that a checkpoint may have besides those of ``weight_slots``."""
        return []

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Two layers of a kind stay: the very first has nothing to add up."""
        whole, kinds = self.layers, dict[AttentionSpec, list[DecoderLayer]]()
        for layer in self.decoder_layers():
            kinds.setdefault(replace(layer.spec, layer=0), []).append(layer)
        self.layers = nn.ModuleList(layer for like in kinds.values() for layer in like[:2])
        try:
            yield
        finally:
            self.layers = whole

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def _checked_max_position(config: DecoderConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_position
    if not 1 <= asked <= config.max_position:
        raise ConfigError(
            f"a longest sequence of {asked} tokens was asked for; this model's positions are "
            f"right from 1 to {config.max_position} tokens; choose a length in that range"
        )
    return asked


def _add_and_norm(
    norm: RMSNorm, delta: torch.Tensor | None, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum."""
    if delta is None:
        return rms_norm(hidden, norm.weight, norm.eps), hidden
    return add_rms_norm(delta, hidden, norm.weight, norm.eps)


def _apply(
    projection: nn.Linear,
    x: torch.Tensor,
    *,
    norm: RMSNorm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    before = None if norm is None else Norm(norm.weight, norm.eps)
    return linear(
        x, projection.weight, projection.bias, norm=before, gated=gated, residual=residual
    )


class _EmptyLinear(nn.Linear):
    """Draws no weights. torch's skip_init draws them on ``meta``, which imports all of Dynamo."""

    def reset_parameters(self) -> None:
        pass


def _empty_linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    linear = _EmptyLinear(inputs, outputs, bias=bias, device=device, dtype=dtype)
    linear = linear.requires_grad_(False)
    if device.type == "cpu" and outputs >= inputs:
        # Read fastest on the CPU with the longer dimension contiguous: up to a quarter less time
        # for small batches. To everybody else it is the same tensor.
        linear.weight.data = torch.empty(inputs, outputs, device=device, dtype=dtype).T
    return linear


def _slot(name: str, parameter: torch.Tensor) -> WeightSlot:
    return WeightSlot(name, parameter.detach(), parameter.shape)


def _linear_slots(prefix: str, linear: nn.Linear, sizes: dict[str, int]) -> Iterator[WeightSlot]:
    """The parts of a fused linear, which stand in it in the order of ``sizes``."""
    start = 0
    for name, size in sizes.items():
        yield _slot(f"{prefix}.{name}.weight", linear.weight[start : start + size])
        if linear.bias is not None:
            yield _slot(f"{prefix}.{name}.bias", linear.bias[start : start + size])
        start += size
