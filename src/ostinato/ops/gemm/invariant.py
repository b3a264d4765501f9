"""``linear`` whose every row has the same bits whatever rows are computed with it.

On CUDA it is one kernel (``ops.gemm.triton.invariant_gemm``), behind one for the norm. On the CPU
each row is computed by itself, in memory of its own: torch's GEMMs depend on the number of rows,
and its elementwise functions on where a row begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ostinato.ops.define import define_for_cpu
from ostinato.ops.gemm.invariant_tiles import InvariantTile, invariant_tile
from ostinato.ops.gemm.linear import Gemm, check_shapes, torch_linear
from ostinato.ops.norm import Norm, rms_norm
from ostinato.ops.triton.launch import launch, num_sms, overlap

if TYPE_CHECKING:
    from ostinato.ops.activation import Activation

_GROUP = 8  # tiles of the weight that stay in the L2 cache while all rows pass

# Tiles take this many inputs at a time, or half as many. Triton turns the sum of a single dot
# and a bias or residual into a dot that begins with the latter, which rounds differently: so
# all tiles of a weight take several dots, or all take a single one.
_MOST_BLOCK_K = 128


def invariant_linear(gemm: Gemm) -> torch.Tensor:
    """``linear`` of these operands: a new [M, N], or [M, N / 2] if gated. Never synchronises."""
    check_shapes(gemm)
    if gemm.norm is not None and gemm.x.is_cuda:
        gemm = gemm._replace(x=rms_norm(gemm.x, *gemm.norm), norm=None)
    outputs = gemm.weight.shape[0] // 2 if gemm.gated else gemm.weight.shape[0]
    out = gemm.x.new_empty(gemm.x.shape[0], outputs)
    if out.numel() == 0:
        return out
    if gemm.x.is_cuda:
        sms = num_sms(out.device)
        run_tile(invariant_tile(out.shape[0], outputs, gemm.gated, sms), gemm, out)
        return out
    x, weight, bias, norm, gated, residual, activation = gemm
    norm_weight, eps = (None, 0.0) if norm is None else norm
    _each_row(x, weight, bias, norm_weight, residual, out, eps, gated, activation)
    return out


def each_row(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``run(x)``, on the CPU for one row after another.

    CUDA kernels that compute a row in one program treat all rows alike.
    """
    if x.is_cuda or x.shape[0] == 0:
        return run(x)
    return torch.cat([run(row.clone()) for row in x.split(1)])


def run_tile(tile: InvariantTile, gemm: Gemm, out: torch.Tensor) -> None:
    """The GEMM, which has no norm, to ``out``. CPU tensors are for tests, under the interpreter."""
    from ostinato.ops.gemm.triton.invariant_gemm import invariant_gemm_kernel

    weight, bias, residual = gemm.weight, gemm.bias, gemm.residual
    x = gemm.x if gemm.x.stride(1) == 1 else gemm.x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    num_rows, outputs = out.shape
    block_k = tile.block_k if x.shape[1] > _MOST_BLOCK_K else _MOST_BLOCK_K // 2
    bulk = tile.bulk and all(map(_takes_bulk_copies, (x, weight)))
    tensors: tuple[torch.Tensor | None, ...] = (out, bias, residual)
    constants: dict[str, Any] = {}
    if bulk:
        from triton.tools.tensor_descriptor import TensorDescriptor

        constants["descriptors"] = [
            TensorDescriptor(each, list(each.shape), list(each.stride()), [rows, block_k])
            for each, rows in ((x, tile.block_m), (weight, tile.block_n))
        ]
    else:
        tensors = (x, weight, *tensors)
    launch(
        invariant_gemm_kernel,
        (-(-num_rows // tile.block_m) * -(-outputs // tile.block_n),),
        tensors,
        (num_rows, x.stride(0), 0 if residual is None else residual.stride(0)),
        **constants,
        N=outputs,
        K=x.shape[1],
        GATED=gemm.gated,
        ACTIVATION=gemm.activation,
        SWAP=tile.swap,
        BULK=bulk,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        GROUP=_GROUP,
        STAGES=tile.num_stages,
        **overlap(out.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def _takes_bulk_copies(operand: torch.Tensor) -> bool:
    return operand.data_ptr() % 16 == 0 and operand.stride(0) * operand.itemsize % 16 == 0


def _prepare_each_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    gated: bool,
    activation: Activation,
) -> Callable[[], None]:
    own_norm = None if norm is None else Norm(norm, eps)
    residuals = [None] * x.shape[0] if residual is None else residual.split(1)

    def run() -> None:
        for row, its_residual, target in zip(x.split(1), residuals, out.split(1), strict=True):
            kept = None if its_residual is None else its_residual.clone()
            gemm = Gemm(row.clone(), weight, bias, own_norm, gated, kept, activation)
            target.copy_(torch_linear(gemm))

    return run


_each_row = define_for_cpu(
    """invariant_linear(
    Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor? residual, Tensor(a!) out,
    float eps, bool gated, str activation
) -> ()""",
    prepare=_prepare_each_row,
)
