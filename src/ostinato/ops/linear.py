"""A matrix product with the norm before it and the activation and the sum after it.

For the few rows of a decode step on CUDA that is one kernel (``kernels.linear``), cut as
``operators.tuning`` says, and for more than one row another for the norm; for everything else it is
torch's operators, in ``wide``. Either way the result is a new tensor, and shapes alone decide, so
that a graph and an eager call agree. It is a plain function: a step captures it, torch.compile
should not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ostinato.errors import BatchError
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, overlap
from ostinato.ops.tuning import (
    MAX_ROWS,
    Blocks,
    GemmChoice,
    LinearShape,
    row_class,
    tuning,
)

_HALVES = (torch.float16, torch.bfloat16)
_EVICT = "evict_first"  # a weight is read once a step, and the next step finds it gone anyway


class Norm(NamedTuple):
    """An RMS norm of the input: x / sqrt(mean(x^2) + eps) * weight."""

    weight: torch.Tensor  # [K]
    eps: float


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """norm(x) @ weight.T + bias; silu(first half) * second half if ``gated``; + ``residual``.

    ``x`` is [M, K], ``weight`` [N, K], the result [M, N], or [M, N / 2] if gated, in x's type. Sums
    are in float32. Never synchronises; allocates the result, and sums of products that are split.
    """
    _check(x, weight, bias, norm, gated, residual)
    choice = _choice(x, weight, bias, norm, gated, residual)
    if choice == "torch":
        return wide(x, weight, bias, norm, gated, residual)
    return run_kernel(choice, x, weight, bias, norm, gated, residual)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> None:
    """A kernel would read beyond a tensor that is too small."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise BatchError(
            f"inputs of shape {list(x.shape)} do not fit a weight of shape {list(weight.shape)}; "
            "linear takes [M, K] and [N, K]"
        )
    rows, columns = weight.shape
    if gated and rows % 2:
        raise BatchError(f"a gated weight has two halves; this one has {rows} rows")
    outputs = rows // 2 if gated else rows
    for name, given, wanted in (
        ("the bias", bias, [rows]),
        ("the norm's weight", norm.weight if norm else None, [columns]),
        ("the residual", residual, [x.shape[0], outputs]),
    ):
        if given is not None and list(given.shape) != wanted:
            raise BatchError(f"{name} has the shape {list(given.shape)}; {wanted} fits here")


# --- torch's way ----------------------------------------------------------------------------------


def wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """The same from several operators: for many rows, for other devices, and the kernels' twin."""
    if norm is not None:
        from ostinato.ops.norm import rms_norm

        x = rms_norm(x, norm.weight, norm.eps)
    if residual is not None and bias is None and not gated:
        return torch.addmm(residual, x, weight.mT)
    y = F.linear(x, weight, bias)
    if gated:
        from ostinato.ops.activation import silu_and_mul

        y = silu_and_mul(y)
    return y if residual is None else y + residual


# --- our kernels ----------------------------------------------------------------------------------


def _choice(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> GemmChoice:
    if not x.is_cuda or not 1 <= x.shape[0] <= MAX_ROWS or x.dtype not in _HALVES:
        return "torch"
    others = (weight, bias, norm.weight if norm else None, residual)
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in others):
        return "torch"
    rows_in_one_piece = x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    if not weight.is_contiguous() or not rows_in_one_piece or not _has_kernels(x.device):
        return "torch"
    flags = (norm is not None, gated, residual is not None)
    shape = LinearShape(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, *flags)
    return tuning().choice(shape, _gpu(x.device))


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Tensor cores that know bfloat16, and a compiler."""
    has_cores = torch.cuda.get_device_capability(device) >= (8, 0)
    return has_cores and find_spec("triton") is not None


def run_kernel(
    blocks: Blocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Cut as ``blocks`` says. ``weight`` is contiguous, and rows are in one piece.

    One kernel, except that the norm of several rows is one of its own.
    """
    if norm is not None and x.shape[0] > 1:
        from ostinato.ops.norm import rms_norm

        x, norm = rms_norm(x, norm.weight, norm.eps), None
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    kernel, grid, tensors, numbers, options = prepare(
        blocks, x, weight, bias, norm, gated, residual, out
    )
    launch(kernel, grid, tensors, numbers, **options)
    return out


def prepare(
    blocks: Blocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[Any, tuple[int, ...], Sequence[torch.Tensor | None], Sequence[float], dict[str, Any]]:
    """A kernel, and what ``launch`` takes beside it. ``norm`` is for one row."""
    from ostinato.ops.triton.linear import row_kernel, tile_kernel

    num_rows, outputs = out.shape
    tiles = -(-outputs // blocks.block_n)
    constants: dict[str, Any] = {
        "N": outputs,
        "K": x.shape[1],
        "GATED": gated,
        "BLOCK_N": blocks.block_n,
        "BLOCK_K": blocks.block_k,
        "PREFETCH": blocks.prefetch,
        "EVICT": _EVICT,
        "num_warps": blocks.num_warps,
        **overlap(x.device),
    }
    tensors: tuple[torch.Tensor | None, ...]
    if num_rows == 1:
        norm_weight, eps = (None, 0.0) if norm is None else norm
        tensors = (x, weight, bias, norm_weight, residual, out)
        return row_kernel, (tiles,), tensors, (eps,), {**constants, "num_stages": 1}
    block_m = row_class(num_rows)
    sums = _sums(blocks, tiles, block_m, gated, x.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    numbers = (num_rows, x.stride(0), residual_stride)
    constants |= {
        "BLOCK_M": block_m,
        "SPLIT_K": blocks.split_k,
        "STAGES": blocks.num_stages,
        "num_stages": blocks.num_stages,
    }
    tensors = (x, weight, bias, residual, out, *sums)
    return tile_kernel, (tiles, blocks.split_k), tensors, numbers, constants


# --- products that are split ----------------------------------------------------------------------


def _sums(
    blocks: Blocks, tiles: int, block_m: int, gated: bool, device: torch.device
) -> tuple[torch.Tensor | None, ...]:
    """Memory for a split product: sums, and how many programs are done with theirs."""
    if blocks.split_k == 1:
        return None, None
    parts = (tiles, blocks.split_k, 2 if gated else 1, blocks.block_n, block_m)
    partial = torch.empty(parts, device=device, dtype=torch.float32)
    return partial, take_counters(device, tiles)
