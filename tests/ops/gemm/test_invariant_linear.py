"""The batch-invariant GEMM: right, and a row's bits are the same at every place of every batch.

Without a GPU the CUDA kernel runs in Triton's interpreter, whose matrix products are NumPy's and
depend on their shape: there it is compared with float64 alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.errors import BatchError
from ostinato.ops.activation import activate
from ostinato.ops.gemm.invariant import each_row, invariant_linear, run_tile
from ostinato.ops.gemm.invariant_tiles import InvariantTile, invariant_tile
from ostinato.ops.gemm.linear import Gemm, Norm

pytest.importorskip("triton")

H200_SMS = 132


def operands(
    num_rows: int, outputs: int, k: int, gated: bool, device: torch.device, dtype: torch.dtype
) -> Gemm:
    draw = torch.Generator().manual_seed(outputs + k)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * size).to(device, dtype)

    width = outputs * (1 + gated)
    weight, bias, norm = normal(width, k, size=k**-0.5), normal(width), normal(k)
    x, residual = normal(num_rows, k), normal(num_rows, outputs)
    return Gemm(x, weight, bias, Norm(norm, 1e-5), gated, residual)


def expected(gemm: Gemm) -> Tensor:
    """The same in float64."""
    x, weight, bias, norm, gated, residual, activation = gemm
    assert bias is not None
    assert residual is not None
    x = x.double()
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    y = x @ weight.double().T + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = activate(gate, activation) * up
    return y + residual.double()


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "k"), [(96, 64), (40, 100), (40, 128), (24, 200)])
def test_a_row_has_the_same_bits_in_every_batch(
    device: torch.device, outputs: int, k: int, gated: bool
) -> None:
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    most = 4500 if on_cuda else 70
    gemm = operands(most, outputs, k, gated, device, dtype)
    assert gemm.residual is not None
    whole = invariant_linear(gemm)
    tolerance = 6e-2 if on_cuda else 1e-4
    torch.testing.assert_close(whole.double(), expected(gemm), rtol=tolerance, atol=tolerance)
    for num_rows in (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 256, 513, 1024, 2048):
        for first in sorted({0, 1, 3, num_rows // 2}):
            rows = slice(first, first + num_rows)
            if rows.stop > most:
                continue
            part = gemm._replace(x=gemm.x[rows], residual=gemm.residual[rows])
            assert torch.equal(invariant_linear(part), whole[rows]), (num_rows, first)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 20, 70, 130])
def test_every_tile_computes_the_gemm(num_rows: int, gated: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    gemm = operands(num_rows, 40, 72, gated, torch.device("cpu"), torch.float32)
    gemm = gemm._replace(norm=None)
    tile = invariant_tile(num_rows, 40, gated, H200_SMS)
    for bulk in (False, True):
        out = torch.full((num_rows, 40), torch.nan)
        run_tile(tile._replace(bulk=bulk), gemm, out)
        torch.testing.assert_close(out.double(), expected(gemm), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit_an_h200(gated: bool) -> None:
    """Shared memory, and accumulators in registers."""
    tiles: set[InvariantTile] = {
        invariant_tile(num_rows, outputs, gated, H200_SMS)
        for num_rows in (*range(1, 300), 512, 513, 4095, 4096, 8192)
        for outputs in (64, 4096, 14336, 128256)
    }
    assert {tile.block_k for tile in tiles} <= {64, 128}  # on which run_tile relies
    for tile in tiles:
        rows = tile.block_m + (1 + gated) * tile.block_n
        assert rows * tile.block_k * 2 * tile.num_stages <= 227 * 1024
        assert tile.block_m * tile.block_n * (1 + gated) <= 32 * tile.num_warps * 128


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match=r"inputs of shape \[2, 3\] do not fit a weight"):
        invariant_linear(Gemm(torch.zeros(2, 3), torch.zeros(4, 5)))


def test_no_rows(device: torch.device) -> None:
    empty = torch.zeros(0, 8, device=device)
    assert invariant_linear(Gemm(empty, torch.zeros(4, 8, device=device))).shape == (0, 4)
    assert each_row(torch.exp, empty).shape == (0, 8)
