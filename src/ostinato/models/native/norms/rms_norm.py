"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, with the mean in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.ops.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """The norm over the last dimension. Its weight broadcasts: [D], or one row per head.

    A float32 weight multiplies rows of any dtype before they are rounded.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 0.0  # added to the checkpoint's weight
        self.weight = nn.Parameter(
            torch.empty(shape, device=device, dtype=dtype), requires_grad=False
        )
        # A tensor, because addcmul requires one.
        self.register_buffer(
            "_eps", torch.full((1,), eps, dtype=torch.float32, device=device), persistent=False
        )
        self._eps: torch.Tensor

    def forward(self, x: torch.Tensor, heads: slice | None = None) -> torch.Tensor:
        """``heads``: the rows of the weight that belong to ``x``; None: all."""
        weight = self.weight if heads is None else self.weight[heads]
        if weight.dtype != x.dtype:
            return (F.rms_norm(x.float(), weight.shape[-1:], eps=self.eps) * weight).to(x.dtype)
        if x.is_cuda:
            if weight.dim() == 1:
                return F.rms_norm(x, weight.shape, weight, self.eps)
            return F.rms_norm(x, weight.shape[-1:], eps=self.eps) * weight
        # torch has no fused CPU kernel; this uses fewer operators than F.rms_norm.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype) * weight

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        """The same in one kernel, where there is one."""
        return rms_norm(x, self.weight, self.eps)

    def fused_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual + x``, and the sum; ``x`` may be partial sums."""
        return add_rms_norm(x, residual, self.weight, self.eps)
