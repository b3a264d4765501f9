"""One transformer layer: what it computes, written once.

Which kernels run it, and what they fuse, is the strategy's business (``layer_kernels.py``); what
ranks trade inside it, the exchange's (``exchange.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.models.native.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.layer_kernels import AnyKernels, Linear
from ostinato.models.native.norm import RMSNorm
from ostinato.models.weight_slot import WeightSlot


class DecoderLayer(nn.Module):
    """Attention, then SwiGLU, each behind a norm and added to the residual stream."""

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
        self.head_counts = (config.num_heads, config.num_kv_heads)
        self.rms_norm_eps = config.rms_norm_eps
        hidden, width = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return empty_linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(*shape: int) -> RMSNorm:
            return RMSNorm(shape, config.rms_norm_eps, device=device, dtype=dtype)

        self.attention_norm = norm(hidden)
        self.qkv_proj = linear(hidden, queries + 2 * keys, config.qkv_bias)
        self.qk_norm = norm(sum(self.head_counts), config.head_dim) if config.qk_norm else None
        self.o_proj = linear(queries, hidden, config.output_bias)
        self.mlp_norm = norm(hidden)
        self.gate_up_proj = linear(hidden, 2 * width, config.mlp_bias)
        self.down_proj = linear(width, hidden, config.mlp_bias)

    def forward(
        self, x: Any, residual: torch.Tensor | None, run: AnyKernels
    ) -> tuple[Any, torch.Tensor]:
        """``x``: what is still to be added to the residual stream; at first, all of it.

        Returns the same for the next layer. What ``x`` is, only ``run`` knows.
        """
        x, residual = run.norm(self.attention_norm, x, residual)
        x = self.attention(x, run)
        x, residual = run.norm(self.mlp_norm, x, residual)
        x = self.mlp(x, run)
        return x, residual

    def attention(self, x: Any, run: AnyKernels) -> Any:
        return self._output(self.o_proj, run.attend(self, self.qkv(x, run)), run)

    def mlp(self, x: Any, run: AnyKernels) -> Any:
        return self._output(self.down_proj, run.gated(self.gate_up_proj, x), run)

    def qkv(self, x: Any, run: AnyKernels) -> torch.Tensor:
        return run.project(self.qkv_proj, x)

    def _output(self, projection: Linear, x: torch.Tensor, run: AnyKernels) -> Any:
        """What a sublayer adds to the residual stream."""
        if not self.exchange.sums:
            return run.output(projection, x)
        return self.exchange.sum(run.project(projection, x))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The layer's tensors as checkpoints name them."""
        num_heads, num_kv_heads = self.head_counts
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
        yield whole_slot(f"{prefix}.input_layernorm.weight", self.attention_norm.weight)
        yield whole_slot(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm.weight)
        if self.qk_norm is not None:  # one weight for all heads, repeated for each
            per_head = self.qk_norm.weight.detach().split(self.head_counts)
            for name, target in zip(("q_norm", "k_norm"), per_head, strict=True):
                shape = torch.Size([head_dim])
                yield WeightSlot(f"{prefix}.self_attn.{name}.weight", target, shape)


class _EmptyLinear(nn.Linear):
    """Draws no weights. torch's skip_init draws them on ``meta``, which imports all of Dynamo."""

    def reset_parameters(self) -> None:
        pass


def empty_linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """A linear module whose parameters hold no values yet."""
    linear = _EmptyLinear(inputs, outputs, bias=bias, device=device, dtype=dtype)
    linear = linear.requires_grad_(False)
    if device.type == "cpu" and outputs >= inputs:
        # Read fastest on the CPU with the longer dimension contiguous: up to a quarter less time
        # for small batches. To everything else it is the same tensor.
        linear.weight.data = torch.empty(inputs, outputs, device=device, dtype=dtype).T
    return linear


def whole_slot(name: str, parameter: torch.Tensor) -> WeightSlot:
    """A parameter that is one tensor of a checkpoint."""
    return WeightSlot(name, parameter.detach(), parameter.shape)


def _linear_slots(prefix: str, linear: nn.Linear, sizes: dict[str, int]) -> Iterator[WeightSlot]:
    """The parts of a fused linear, which stand in it in the order of ``sizes``."""
    start = 0
    for name, size in sizes.items():
        yield whole_slot(f"{prefix}.{name}.weight", linear.weight[start : start + size])
        if linear.bias is not None:
            yield whole_slot(f"{prefix}.{name}.bias", linear.bias[start : start + size])
        start += size
