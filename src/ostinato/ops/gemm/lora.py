"""LoRA of a GEMM: y += (x @ A.T) @ B.T, where every row of x has an adapter of its own, or none.

The matrices of all adapters are stacked in slots, and an index gives the slot of each row, so the
adapters of a batch may change between replays of one graph. There are two operators: ``shrink``
(x @ A.T, a few columns per row) and ``expand`` (the rest). On CUDA each is one Triton kernel, which
reads the matrices of an active adapter once for every block of rows. Elsewhere each is a GEMM over
all active adapters, in torch. Shapes alone decide what runs, and nothing synchronises.

Call ``shrink`` before the GEMM itself: it is short, and GEMMs that overlap with the previous kernel
fetch their first weights meanwhile. The small-M GEMMs of decode steps expand in their own kernels
(``ops.gemm.lora_linear``).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ostinato.ops.activation import silu_and_mul
from ostinato.ops.gemm.tile_config import row_class
from ostinato.ops.triton.launch import launch, next_power_of_2, overlap

NO_SLOT = -1  # of a row without an adapter
NOT_ACTIVE = -2  # fills up the list of active slots; not equal to the slot of any row

_MOST_ROWS_SPLIT = 64  # more rows fill the GPU without split-K
_SPLIT_LENGTH = 512  # inner elements of a part
_MOST_SPLITS = 16
RANK_TILE = 32  # ranks that one program of a small-M shrink computes
_MOST_PARTIAL = 16384  # values that a reader adds up, of all rows and splits


class LoraWeights(NamedTuple):
    """The adapters of one GEMM, by slot. ``b`` includes the scaling factor.

    The GEMM's result has ``widths[p]`` columns of part p, such as queries, keys and values. A part
    has R rows of ``a``, and its columns' rows of ``b``. Smaller ranks than R are filled with zeros.
    """

    a: torch.Tensor  # [slots, parts * R, K]
    b: torch.Tensor  # [slots, N, R]
    widths: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class LoraRows(NamedTuple):
    """The adapters of a batch, on the device."""

    slots: torch.Tensor  # [T] int32, of each row; NO_SLOT: none
    active: torch.Tensor  # [n] int32, every slot in use once, and then NOT_ACTIVE


def shrink(x: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """x @ A.T of each row's adapter, for ``x`` [T, K], in a form for ``expand``."""
    run = triton_shrink if x.is_cuda else torch_shrink
    return run(x, weights, rows)


def expand(y: torch.Tensor, small: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """Add ``small`` @ B.T of each row's adapter to ``y`` [T, N], which is contiguous.

    Rows without an adapter keep their values.
    """
    run = triton_expand if y.is_cuda else torch_expand
    run(y, small, weights, rows)


def expand_gated(
    gate_up: torch.Tensor, small: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> torch.Tensor:
    """``expand``, then SiLU of the first half times the second: a new [T, N / 2].

    ``gate_up`` may be overwritten.
    """
    if gate_up.is_cuda:
        return triton_expand_gated(gate_up, small, weights, rows)
    torch_expand(gate_up, small, weights, rows)
    return silu_and_mul(gate_up)


# --- torch ----------------------------------------------------------------------------------------


def torch_shrink(x: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """[T, n, parts, R]: every row with every active adapter, and zeros for those of other rows."""
    a = weights.a.index_select(0, rows.active.clamp(min=0))  # [n, parts * R, K]
    small: torch.Tensor = (x @ a.flatten(0, 1).T).view(len(x), len(a), len(weights.widths), -1)
    others = rows.slots[:, None] != rows.active
    return small.masked_fill(others[:, :, None, None], 0.0)


def torch_expand(
    y: torch.Tensor, small: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> None:
    b = weights.b.index_select(0, rows.active.clamp(min=0))  # [n, N, R]
    start = 0
    for part, width in enumerate(weights.widths):
        columns = slice(start, start + width)
        start += width
        stacked = b[:, columns].transpose(1, 2).flatten(0, 1)  # [n * R, width]
        y[:, columns].add_(small[:, :, part].flatten(1) @ stacked)


# --- Triton: CPU tensors are for the tests, under its interpreter ---------------------------------


def triton_shrink(x: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """[splits, T, parts * R] in float32, to be summed; rows without an adapter are not written."""
    from ostinato.ops.gemm.triton.lora_shrink import lora_shrink_kernel

    (num_rows, inner), parts = x.shape, len(weights.widths)
    x = x if x.stride(1) == 1 else x.contiguous()
    splits = num_splits(num_rows, inner, weights.rank)
    shape = (splits, num_rows, parts * weights.rank)
    small = torch.empty(shape, dtype=torch.float32, device=x.device)
    constants, blocks = _constants(small, weights)
    if num_rows <= _MOST_ROWS_SPLIT:  # in pieces of few ranks, so that programs are many
        constants["RANK"] = min(weights.rank, RANK_TILE)
    pieces = parts * weights.rank // constants["RANK"]
    if num_rows:
        launch(
            lora_shrink_kernel,
            (rows.active.shape[0], blocks * pieces, splits),
            (x, weights.a, rows.slots, rows.active, small),
            (num_rows, x.stride(0)),
            K=inner,
            PARTS=pieces,
            **_pipeline(constants["BLOCK_M"] + constants["RANK"], x.itemsize),
            **constants,
        )
    return small


def num_splits(num_rows: int, inner: int, rank: int) -> int:
    """The splits of ``shrink``'s split-K. Its readers read all partial sums, so there are few."""
    if num_rows > _MOST_ROWS_SPLIT:
        return 1
    splits = min(_MOST_SPLITS, next_power_of_2(-(-inner // _SPLIT_LENGTH)))
    return max(1, min(splits, _MOST_PARTIAL // (rank * row_class(num_rows))))


def triton_expand(
    y: torch.Tensor, small: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> None:
    from ostinato.ops.gemm.triton.lora import lora_expand_kernel

    ends, parts = list(accumulate(weights.widths)), len(weights.widths)
    block_n = 128 if weights.rank < 256 else 64
    first = list(accumulate((-(-width // block_n) for width in weights.widths), initial=0))
    constants, blocks = _constants(small, weights)
    if blocks:
        launch(
            lora_expand_kernel,
            (first[-1], rows.active.shape[0], blocks),
            (y, weights.b, rows.slots, rows.active, small),
            (y.shape[0],),
            N=ends[-1],
            PARTS=parts,
            # Where the second and the third part begin, in columns and in tiles.
            COLUMN_1=ends[0],
            COLUMN_2=ends[min(1, parts - 1)],
            TILE_1=first[1],
            TILE_2=first[min(2, parts)],
            BLOCK_N=block_n,
            **constants,
        )


def triton_expand_gated(
    gate_up: torch.Tensor, small: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> torch.Tensor:
    from ostinato.ops.gemm.triton.lora import lora_expand_gated_kernel

    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    constants, blocks = _constants(small, weights)
    num_active = rows.active.shape[0]
    few = constants["BLOCK_M"] * weights.rank <= 512
    block_n = 128 if few else 64 if weights.rank < 256 else 32  # of each half
    if blocks:
        launch(
            lora_expand_gated_kernel,
            # One more for the rows without an adapter.
            (-(-width // block_n), num_active + 1, blocks),
            (gate_up, weights.b, rows.slots, rows.active, small, out),
            (num_rows, num_active),
            WIDTH=width,
            PARTS=len(weights.widths),
            BLOCK_N=block_n,
            **constants,
        )
    return out


def _pipeline(num_columns: int, itemsize: int) -> dict[str, Any]:
    """The longest pieces of K, and the most of them in flight, that fit into any GPU's SMs."""
    sizes = ((128, 5), (128, 3), (64, 3), (32, 3))
    fits = (
        {"BLOCK_K": block_k, "num_stages": stages}
        for block_k, stages in sizes
        if num_columns * itemsize * block_k * stages <= 90 * 1024
    )
    return next(fits, {"BLOCK_K": 32, "num_stages": 2})


def _constants(small: torch.Tensor, weights: LoraWeights) -> tuple[dict[str, Any], int]:
    """What all kernels have in common, and the number of blocks of rows."""
    splits, num_rows, _ = small.shape
    most = 16 if weights.a.dtype is torch.float32 else 64  # no tensor cores, more registers
    block_m = min(most, max(16, next_power_of_2(max(num_rows, 1))))
    constants = {
        "RANK": weights.rank,
        "SPLITS": splits,
        "BLOCK_M": block_m,
        **overlap(small.device),
        "num_warps": 8 if block_m * weights.rank > 1024 else 4,
    }
    return constants, -(-num_rows // block_m)
