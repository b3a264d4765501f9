"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, with the mean taken in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """The norm over the last dimension. Its weight broadcasts: [D], or one row per head.

    A weight in float32 multiplies rows of any type before they are rounded.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 0.0  # what is added to the weight of a checkpoint
        self.weight = nn.Parameter(
            torch.empty(shape, device=device, dtype=dtype), requires_grad=False
        )
        # A tensor, because addcmul takes it as the term to add to.
        self.register_buffer("_eps", torch.full((1,), eps, device=device), persistent=False)
        self._eps: torch.Tensor

    def forward(self, x: torch.Tensor, heads: slice | None = None) -> torch.Tensor:
        """``heads``: which rows of the weight ``x`` is for; None for all."""
        weight = self.weight if heads is None else self.weight[heads]
        if weight.dtype != x.dtype:
            return (F.rms_norm(x.float(), weight.shape[-1:], eps=self.eps) * weight).to(x.dtype)
        if x.is_cuda:
            if weight.dim() == 1:
                return F.rms_norm(x, weight.shape, weight, self.eps)
            return F.rms_norm(x, weight.shape[-1:], eps=self.eps) * weight
        # On the CPU torch has no fused kernel; these are fewer operators than F.rms_norm's.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype) * weight
