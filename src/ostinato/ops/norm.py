"""RMSNorm, alone or after adding a residual: x / sqrt(mean(x^2) + eps) * weight.

The mean is computed in float32. The normalised value is rounded to the dtype of ``x`` before it is
multiplied by the weight, unless that is float32, as in transformers. On CUDA this is one Triton
kernel; on the CPU a Numba kernel, or plain torch operators, which CPU graphs can replay in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ostinato.ops.define import define_for_cpu
from ostinato.ops.numba import MOST_ROWS, prepare_kernel, runs_compiled
from ostinato.ops.triton.launch import launch, next_power_of_2, overlap


class Norm(NamedTuple):
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight."""

    weight: torch.Tensor  # [D], in the dtype of x or float32
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of ``x`` [..., D] over its last dimension; ``weight`` [D], of its dtype or float32.

    Returns a new, dense tensor. Rows may have any strides: slices of a fused projection are not
    copied.
    """
    if x.is_cuda:
        return triton_rms_norm(x, weight, eps)
    if _compiled_rows(x, weight) and runs_compiled(x, weight):
        out = torch.empty_like(x)
        _compiled_rms_norm(x, weight, out, eps)
        return out
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale: torch.Tensor = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return ((x * scale).to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``, both new tensors.

    Both terms have one dtype, and so has ``weight``, unless it is float32. The sum is rounded to
    that dtype before it is normalised. ``x`` may be partial sums (``split_k_gemm``), with one more
    leading dimension than ``residual``.
    """
    if x.is_cuda:
        return triton_add_rms_norm(x, residual, weight, eps)
    if (
        x.shape == residual.shape
        and _compiled_rows(x, weight)
        and runs_compiled(x, residual, weight)
    ):
        out, total = torch.empty_like(x), torch.empty_like(x)
        _compiled_add_rms_norm(x, residual, weight, out, total, eps)
        return out, total
    if x.dim() > residual.dim():
        total = (x.float().sum(0) + residual.float()).to(x.dtype)
    else:
        total = x + residual
    return rms_norm(total, weight, eps), total


def add_output_norm(
    x: torch.Tensor, residual: torch.Tensor, output_norm: Norm, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(total), total)`` of ``total`` = residual + output_norm(x); both new tensors.

    For layers with norms after each sublayer. ``norm`` None: the total twice. ``x`` [T, D] may be
    partial sums [P, T, D]; ``residual`` is [T, D]. Both norms are those of ``rms_norm``, and their
    weights have one dtype.
    """
    if x.is_cuda:
        return triton_add_output_norm(x, residual, output_norm, norm)
    if x.dim() > residual.dim():
        x = x.float().sum(0).to(x.dtype)
    normed = rms_norm(x, *output_norm)
    if norm is not None:
        return add_rms_norm(normed, residual, *norm)
    total = residual + normed
    return total, total


def _compiled_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the compiled CPU kernel takes these rows and their weight."""
    return x.dim() == 2 and x.shape[0] <= MOST_ROWS and weight.shape == x.shape[1:]


def triton_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm`` in Triton. CPU tensors are for the tests, under Triton's interpreter."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def triton_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` in Triton."""
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def triton_add_output_norm(
    x: torch.Tensor, residual: torch.Tensor, output_norm: Norm, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_output_norm`` in Triton."""
    from ostinato.ops.triton.norm import output_norm_kernel

    total = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    out = total if norm is None else torch.empty_like(total)
    if total.numel() == 0:
        return out, total
    rows = row_parts(x, residual)
    launch(
        output_norm_kernel,
        (residual.shape[0],),
        (
            rows.x,
            rows.residual,
            output_norm.weight,
            None if norm is None else norm.weight,
            None if norm is None else out,
            total,
        ),
        (output_norm.eps, 0.0 if norm is None else norm.eps, *rows.strides),
        **rows.constants,
    )
    return out, total


class RowParts(NamedTuple):
    """The arguments of a norm kernel for rows [T, D], or [P, T, D] that are to be summed."""

    x: torch.Tensor
    residual: torch.Tensor | None
    strides: tuple[int, int, int]  # of rows of x, rows of the residual, parts of x
    constants: dict[str, Any]


def row_parts(x: torch.Tensor, residual: torch.Tensor | None) -> RowParts:
    """``x`` and ``residual`` with dense rows, copied if necessary."""
    parts, part_stride, dim = 1, 0, x.shape[-1]
    if x.dim() == 3:
        x = x.contiguous()
        parts, part_stride, x = x.shape[0], x.stride(0), x[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    padded = next_power_of_2(dim)
    constants = {
        "PARTS": parts,
        "DIM": dim,
        "DIM_PAD": padded,
        **overlap(x.device),
        "num_warps": min(16, max(1, padded // 512)),
    }
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), part_stride)
    return RowParts(x, residual, strides, constants)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    from ostinato.ops.triton.norm import rms_norm_kernel

    if out.numel() == 0:
        return
    dim = x.shape[-1]
    parts, part_stride = 1, 0
    if residual is not None and x.dim() > residual.dim():
        x = x.contiguous()  # it usually is; copying only the first part would be wrong
        parts, part_stride, x = x.shape[0], x.stride(0), x[0]
    inner = x.shape[1] if x.dim() == 3 else 1
    x, strides = _dense_rows(x, inner)
    residual_strides = (0, 0)
    if residual is not None:
        residual, residual_strides = _dense_rows(residual, inner)
    padded = next_power_of_2(dim)
    launch(
        rms_norm_kernel,
        (out.numel() // dim,),
        (x, residual, weight.contiguous(), out, total),
        (eps, *strides, *residual_strides, part_stride),
        PARTS=parts,
        INNER=inner,
        DIM=dim,
        DIM_PAD=padded,
        **overlap(x.device),
        num_warps=min(16, max(1, padded // 512)),
    )


def _dense_rows(x: torch.Tensor, inner: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """``x``, copied if necessary, and the strides that put row r at [r // inner, r % inner]."""
    if x.stride(-1) != 1 or x.dim() > 3:
        return x.contiguous(), (inner * x.shape[-1], x.shape[-1])
    if x.dim() == 3:
        return x, (x.stride(0), x.stride(1))
    # Rows of a matrix count as outer rows, whose number is not a constant of the kernel.
    return x, (x.stride(0) if x.dim() == 2 else 0, 0)


_compiled_rms_norm = define_for_cpu(
    "compiled_rms_norm(Tensor x, Tensor weight, Tensor(a!) out, float eps) -> ()",
    prepare=prepare_kernel("rms_norm"),
)
_compiled_add_rms_norm = define_for_cpu(
    """compiled_add_rms_norm(
    Tensor x, Tensor residual, Tensor weight, Tensor(a!) out, Tensor(b!) total, float eps
) -> ()""",
    prepare=prepare_kernel("add_rms_norm"),
)
