"""LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.ops.layer_norm import add_layer_norm, layer_norm


class LayerNorm(nn.Module):
    """The norm over the last dimension, with or without a bias; used like ``RMSNorm``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 0.0  # added to the checkpoint's weight
        self.weight = nn.Parameter(
            torch.empty(shape, device=device, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)
            if bias
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        """The same in one kernel, where there is one."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def fused_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual + x``, and the sum; ``x`` may be partial sums."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)
