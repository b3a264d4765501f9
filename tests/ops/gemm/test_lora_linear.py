"""GEMMs with the adapters of their rows, against a loop over rows in float64.

Without a GPU the kernels run in Triton's interpreter. Real shapes are in
``tests/gpu/test_lora_gpu.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.gemm.linear import Gemm, Norm
from ostinato.ops.gemm.lora import NO_SLOT, NOT_ACTIVE, LoraRows, LoraWeights
from ostinato.ops.gemm.lora_linear import can_fuse, lora_linear, run_lora_kernels
from ostinato.ops.gemm.tile_config import TileConfig

pytest.importorskip("triton")

EXAMPLES = 8 if torch.cuda.is_available() else 12  # CUDA takes a second for every new kernel


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Case:
    """Operands and adapters of a GEMM, and the result in float64."""

    def __init__(
        self,
        device: torch.device,
        slots: list[int],
        *,
        inner: int = 96,
        widths: tuple[int, ...] = (32, 16),
        rank: int = 16,
        num_slots: int = 3,
        spare: int = 0,
        bias: bool = False,
        norm: bool = False,
        gated: bool = False,
        residual: bool = False,
        size: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(len(slots) + inner + rank)
        dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)

        def draw(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(device, dtype)

        self.slots, n = slots, sum(widths)
        x = torch.full((len(slots), inner + 8), torch.nan, device=device, dtype=dtype)[:, :inner]
        x.copy_(draw(len(slots), inner, size=size))
        self.gemm = Gemm(
            x if len(slots) > 1 else x.contiguous(),
            draw(n, inner, size=inner**-0.5),
            draw(n) if bias else None,
            Norm(draw(inner), 1e-5) if norm else None,
            gated,
            draw(len(slots), n // 2 if gated else n) if residual else None,
        )
        a = draw(num_slots, len(widths) * rank, inner, size=inner**-0.5)
        b = draw(num_slots, n, rank, size=rank**-0.5)
        for unused in set(range(num_slots)) - set(slots):
            a[unused], b[unused] = torch.nan, torch.nan
        self.weights = LoraWeights(a, b, widths)
        used = sorted(set(slots) - {NO_SLOT})
        active = (used + [NOT_ACTIVE] * spare) or [NOT_ACTIVE]
        as_int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.rows = LoraRows(torch.tensor(slots, **as_int32), torch.tensor(active, **as_int32))

    def expected(self) -> Tensor:
        gemm, rank, (a, b, widths) = self.gemm, self.weights.rank, self.weights
        x = gemm.x.double()
        if gemm.norm is not None:
            x = F.rms_norm(x, x.shape[1:], gemm.norm.weight.double(), gemm.norm.eps)
        y = F.linear(x, gemm.weight.double(), None if gemm.bias is None else gemm.bias.double())
        for row, slot in enumerate(self.slots):
            end = 0
            for part, width in enumerate(widths if slot != NO_SLOT else ()):
                columns = slice(end, end + width)
                end += width
                small = a[slot, part * rank : (part + 1) * rank].double() @ x[row]
                y[row, columns] += b[slot, columns].double() @ small
        if gemm.gated:
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        return y if gemm.residual is None else y + gemm.residual.double()

    def check(self, config: TileConfig | None) -> None:
        """``config`` None: as the runtime calls it."""
        if config is None:
            y = lora_linear(self.gemm, self.weights, self.rows)
        else:
            assert can_fuse(config, self.gemm, self.weights)
            y = run_lora_kernels(config, self.gemm, self.weights, self.rows)
        assert y.dtype == self.gemm.x.dtype
        tolerance = 1e-4 if y.dtype == torch.float32 else 8 * torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), self.expected(), rtol=tolerance, atol=4 * tolerance)


TILES = TileConfig(16, 32, 4, num_stages=2, prefetch=1)
MIXED = [0, NO_SLOT, 2, 0, 2]


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("gated", [False, True], ids=["wide", "gated"])
@pytest.mark.parametrize("slots", [[2], [NO_SLOT], MIXED], ids=["row", "no adapter", "mixed"])
def test_fusions_stay(
    device: torch.device, slots: list[int], gated: bool, norm: bool, split_k: int
) -> None:
    widths = (24, 24) if gated else (32, 16, 16)
    case = Case(
        device, slots, widths=widths, norm=norm, gated=gated, bias=not norm, residual=not gated
    )
    case.check(TILES._replace(split_k=split_k if len(slots) > 1 else 1))


@pytest.mark.slow
@given(
    slots=st.lists(st.integers(NO_SLOT, 4), min_size=1, max_size=64),
    inner=st.sampled_from([16, 100, 700, 1200]),
    kind=st.sampled_from([("wide", (16, 48, 5)), ("gated", (37, 37)), ("gated", (74,))]),
    rank=st.sampled_from([16, 64, 128]),
    num_slots=st.sampled_from([5, 11]),
    spare=st.integers(0, 3),
    norm=st.booleans(),
    split_k=st.sampled_from([1, 3]),
)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(
    device: torch.device,
    slots: list[int],
    inner: int,
    kind: tuple[str, tuple[int, ...]],
    rank: int,
    num_slots: int,
    spare: int,
    norm: bool,
    split_k: int,
) -> None:
    name, widths = kind
    case = Case(
        device,
        slots,
        inner=inner,
        widths=widths,
        rank=rank,
        num_slots=num_slots,
        spare=spare,
        norm=norm,
        gated=name == "gated",
    )
    case.check(TILES._replace(split_k=split_k if len(slots) > 1 else 1))


@pytest.mark.parametrize("slots", [[1], MIXED], ids=["row", "mixed"])
def test_large_inputs_of_a_norm_fit_float16(device: torch.device, slots: list[int]) -> None:
    """60,000 times a norm's weight overflows float16, though the normed input does not."""
    case = Case(device, slots, norm=True, size=15_000.0, dtype=torch.float16)
    case.check(TILES)


@pytest.mark.parametrize("gated", [False, True], ids=["wide", "gated"])
@pytest.mark.parametrize(
    ("widths", "rank", "num_rows"),
    [((20, 12), 16, 5), ((16, 16), 256, 5), ((16, 16), 16, 90), ((8, 8, 8, 8), 16, 1)],
    ids=["a tile of two parts", "a large rank", "large M", "many parts"],
)
def test_what_cannot_be_fused_is_computed_apart(
    device: torch.device, widths: tuple[int, ...], rank: int, num_rows: int, gated: bool
) -> None:
    if gated:
        widths = (sum(widths),)
    elif len(widths) > 3 and device.type == "cuda":
        pytest.skip("queries, keys and values are the most parts that the kernels know")
    slots = [(2, NO_SLOT, 0)[row % 3] for row in range(num_rows)]
    case = Case(device, slots, widths=widths, rank=rank, norm=True, gated=gated, residual=True)
    fits = gated and rank <= 128
    assert can_fuse(TILES, case.gemm, case.weights) == (fits or num_rows == 90)
    case.check(None)
