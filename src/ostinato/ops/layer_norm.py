"""LayerNorm, alone or after adding a residual: (x - mean) / sqrt(variance + eps) * weight + bias.

Computed in float32 and rounded once. On CUDA this is one Triton kernel; elsewhere torch's operator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.norm import row_parts
from ostinato.ops.triton.launch import launch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The norm of ``x`` [T, D]; ``weight`` and ``bias`` [D], of its dtype or float32."""
    if x.is_cuda:
        return triton_layer_norm(x, weight, bias, eps)
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias, eps).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(layer_norm(x + residual), x + residual)``, both new tensors.

    The sum is rounded before it is normalised. ``x`` may be partial sums [P, T, D].
    """
    if x.is_cuda:
        return triton_add_layer_norm(x, residual, weight, bias, eps)
    if x.dim() > residual.dim():
        total = (x.float().sum(0) + residual.float()).to(x.dtype)
    else:
        total = x + residual
    return layer_norm(total, weight, bias, eps), total


def triton_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """``layer_norm`` in Triton. CPU tensors are for the tests, under Triton's interpreter."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, bias, out, None, eps)
    return out


def triton_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_layer_norm`` in Triton."""
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, bias, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    from ostinato.ops.triton.norm import layer_norm_kernel

    if out.numel() == 0:
        return
    rows = row_parts(x, residual)
    tensors = (rows.x, rows.residual, weight, bias, out, total)
    launch(layer_norm_kernel, (out.shape[0],), tensors, (eps, *rows.strides), **rows.constants)
