"""A GEMM fused with the norm before it, and the activation and residual after it.

For the small M of a decode step on CUDA it is one kernel (``ops.gemm.triton.linear``, or
``ops.gemm.triton.mma_linear`` for 2 to 8 rows on Hopper) with a tile config from
``ops.gemm.tuning``, plus a kernel for the norm where that one does not fuse it. Everything else
runs torch's operators (``torch_linear``). Only shapes, dtypes and strides decide, so a graph and an
eager call agree. ``linear`` is a plain function: graphs capture it; hide it from torch.compile.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from ostinato.errors import BatchError
from ostinato.ops.gemm.tile_config import (
    MAX_ROWS,
    GemmChoice,
    LinearShape,
    TileConfig,
    gpu_of,
    row_class,
)
from ostinato.ops.gemm.tuning import tuning
from ostinato.ops.norm import Norm as Norm  # also exported from here
from ostinato.ops.norm import rms_norm
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, overlap

if TYPE_CHECKING:
    from ostinato.ops.activation import Activation

_HALVES = (torch.float16, torch.bfloat16)
_EVICT = "evict_first"  # a weight is read once a step, and does not stay until the next


class Gemm(NamedTuple):
    """The operands of a ``linear``."""

    x: torch.Tensor  # [M, K]
    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None  # [N]
    norm: Norm | None = None
    gated: bool = False
    residual: torch.Tensor | None = None  # as the result
    activation: Activation = "silu"  # if gated


class LoraTerm(NamedTuple):
    """What adapters add to a GEMM, for our kernels (``ops.gemm.triton.lora_in_gemm``)."""

    b: torch.Tensor  # [slots, N, R]
    small: torch.Tensor  # [splits, M, parts * R]
    scales: torch.Tensor | None  # [M], factors of small; None: as it is
    slots: torch.Tensor  # [M]
    active: torch.Tensor  # [n]
    constants: tuple[int, ...]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """norm(x) @ weight.T + bias; activation(first half) * second half if ``gated``; + ``residual``.

    ``x`` is [M, K], ``weight`` [N, K], the result a new [M, N], or [M, N / 2] if gated, in x's
    dtype. Sums are in float32. Never synchronises; allocates the result, and the partial sums of a
    split-K GEMM.
    """
    return run_linear(Gemm(x, weight, bias, norm, gated, residual, activation))


def run_linear(gemm: Gemm) -> torch.Tensor:
    """``linear`` of these operands."""
    check_shapes(gemm)
    choice = choose_kernel(gemm)
    return torch_linear(gemm) if choice == "torch" else run_kernel(choice, gemm)


def check_shapes(gemm: Gemm) -> None:
    """Raise unless the shapes fit: a kernel would read beyond a tensor that is too small."""
    x, weight, bias, norm, gated, residual, _ = gemm
    x_shape, weight_shape = x.shape, weight.shape
    if len(x_shape) != 2 or len(weight_shape) != 2 or x_shape[1] != weight_shape[1]:
        raise BatchError(
            f"inputs of shape {list(x_shape)} do not fit a weight of shape {list(weight_shape)}; "
            "linear takes [M, K] and [N, K]"
        )
    rows, columns = weight_shape
    if gated and rows % 2:
        raise BatchError(f"a gated weight needs an even number of rows, got {rows}")
    for name, given, wanted in (
        ("the bias", bias, (rows,)),
        ("the norm's weight", norm.weight if norm else None, (columns,)),
        ("the residual", residual, (x_shape[0], rows // 2 if gated else rows)),
    ):
        if given is not None and given.shape != wanted:
            raise BatchError(f"{name} must have shape {list(wanted)}, got {list(given.shape)}")


# --- torch's operators ----------------------------------------------------------------------------


def torch_linear(gemm: Gemm) -> torch.Tensor:
    """The GEMM by torch's operators: for large M, for other devices, and as the reference."""
    x, weight, bias, norm, gated, residual, _ = gemm
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    if residual is not None and bias is None and not gated:
        return torch.addmm(residual, x, weight.mT)
    y = F.linear(x, weight, bias)
    if gated:
        from ostinato.ops.activation import activate_and_mul

        y = activate_and_mul(y, gemm.activation)
    return y if residual is None else y + residual


# --- our kernels ----------------------------------------------------------------------------------


def choose_kernel(gemm: Gemm, *, adapters: bool = False) -> GemmChoice:
    """The tile config of our kernel for this GEMM; "torch" if there is none or it is slower.

    ``adapters``: of a kernel that can add those of LoRA.
    """
    x, weight, bias, norm, gated, residual, _ = gemm
    if not 1 <= x.shape[0] <= MAX_ROWS or not has_kernels(x.device, x.dtype):
        return "torch"
    others = (weight, bias, residual)
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in others):
        return "torch"
    if norm is not None and norm.weight.dtype not in (x.dtype, torch.float32):
        return "torch"
    dense_rows = x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    if not weight.is_contiguous() or not dense_rows:
        return "torch"
    flags = (norm is not None, gated, residual is not None)
    num_rows = x.shape[0]
    if adapters and num_rows > 1:
        num_rows = max(num_rows, 16)  # in shared memory
    shape = LinearShape(num_rows, weight.shape[0], weight.shape[1], x.dtype, *flags)
    return tuning().choice(shape, gpu_of(x.device))


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are tensor cores for this dtype, and a compiler."""
    if device.type != "cuda" or dtype not in _HALVES or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def run_kernel(config: TileConfig, gemm: Gemm, lora: LoraTerm | None = None) -> torch.Tensor:
    """The GEMM by our kernels. The weight is contiguous, and rows are dense.

    One kernel; the norm of several rows is another. ``lora`` is added to x @ weight.T.
    """
    x, weight, gated = gemm.x, gemm.weight, gemm.gated
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    constants = {
        "N": outputs,
        "K": x.shape[1],
        "GATED": gated,
        "ACTIVATION": gemm.activation,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PREFETCH": config.prefetch,
        "EVICT": _EVICT,
        "LORA": None if lora is None else lora.constants,
        "num_warps": config.num_warps,
        **overlap(x.device),
    }
    num_tiles = -(-outputs // config.block_n)
    if x.shape[0] == 1:
        _run_row(gemm, lora, out, num_tiles, constants)
    elif config.num_stages == 1:
        assert lora is None, "choose_kernel leaves this kernel out for adapters"
        _run_in_registers(gemm, out, num_tiles, constants)
    else:
        _run_tiles(config, gemm, lora, out, num_tiles, constants)
    return out


def _run_row(
    gemm: Gemm,
    lora: LoraTerm | None,
    out: torch.Tensor,
    num_tiles: int,
    constants: dict[str, Any],
) -> None:
    from ostinato.ops.gemm.triton.linear import row_kernel

    x, weight, bias, norm, _, residual, _ = gemm
    norm_weight, eps = (None, 0.0) if norm is None else norm
    adapters = (None,) * 3 if lora is None else (lora.b, lora.small, lora.slots)
    tensors = (x, weight, bias, norm_weight, residual, out, *adapters)
    launch(row_kernel, (num_tiles,), tensors, (eps,), **constants, num_stages=1)


def _run_in_registers(
    gemm: Gemm, out: torch.Tensor, num_tiles: int, constants: dict[str, Any]
) -> None:
    from ostinato.ops.gemm.triton.mma_linear import mma_kernel

    x, weight, bias, norm, _, residual, _ = _with_safe_norm(gemm)
    norm_weight, eps = (None, 0.0) if norm is None else norm
    tensors = (x, weight, bias, norm_weight, residual, out)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    del constants["PREFETCH"], constants["LORA"]
    launch(
        mma_kernel,
        (num_tiles,),
        tensors,
        (x.shape[0], *strides, eps),
        **constants,
        BLOCK_M=row_class(x.shape[0]),
        num_stages=1,
    )


def _with_safe_norm(gemm: Gemm) -> Gemm:
    """The same GEMM; in float16, after its norm: without it, x * norm.weight could overflow."""
    if gemm.norm is None or gemm.x.dtype is not torch.float16:
        return gemm
    return gemm._replace(x=rms_norm(gemm.x, gemm.norm.weight, gemm.norm.eps), norm=None)


def _run_tiles(
    config: TileConfig,
    gemm: Gemm,
    lora: LoraTerm | None,
    out: torch.Tensor,
    num_tiles: int,
    constants: dict[str, Any],
) -> None:
    from ostinato.ops.gemm.triton.linear import tile_kernel

    x, weight, bias, norm, gated, residual, _ = gemm
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    num_rows, split_k = x.shape[0], config.split_k
    block_m = max(16, row_class(num_rows))  # what tensor cores take
    partial = counters = None
    if split_k > 1:
        parts = (num_tiles, split_k, 2 if gated else 1, config.block_n, block_m)
        partial = torch.empty(parts, device=x.device, dtype=torch.float32)
        counters = take_counters(x.device, num_tiles)
    adapters = (None,) * 5 if lora is None else lora[:5]
    residual_stride = 0 if residual is None else residual.stride(0)
    launch(
        tile_kernel,
        (num_tiles, split_k),
        (x, weight, bias, residual, out, partial, counters, *adapters),
        (num_rows, x.stride(0), residual_stride, None if lora is None else len(lora.active)),
        **constants,
        BLOCK_M=block_m,
        SPLIT_K=split_k,
        STAGES=config.num_stages,
        num_stages=config.num_stages,
    )
