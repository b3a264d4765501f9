"""A GEMM with its fusions and the adapters of its rows: norm(x) @ (W + B @ A).T, and what follows.

For the small M of a decode step on CUDA, what adapters add is part of the GEMM's kernel, so the
norm, SwiGLU and residual stay fused. ``shrink``, x @ A.T, is a kernel before it, or part of the
kernel that computes the norm. While it runs, the GEMM's kernel waits and prefetches its weight.
Everything else is ``shrink``, ``linear`` and ``expand``, one after the other. Only shapes, dtypes
and strides decide, so a graph and an eager call agree.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ostinato.ops.activation import activate_and_mul
from ostinato.ops.gemm.linear import Gemm, LoraTerm, check_shapes, choose_kernel, linear, run_kernel
from ostinato.ops.gemm.lora import (
    RANK_TILE,
    LoraRows,
    LoraWeights,
    expand,
    expand_gated,
    num_splits,
    shrink,
    triton_shrink,
)
from ostinato.ops.gemm.tile_config import TileConfig, row_class
from ostinato.ops.norm import rms_norm
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

_MOST_RANK = 128  # larger ones are more than a small term of the GEMM
_ROW_BLOCK_K = 512  # fewest inputs of a program that shrinks one row
_MOST_ROW_SPLITS = 16
_PREFETCH_BYTES = 64 * 1024  # by each program, while it waits


def lora_linear(gemm: Gemm, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """``linear`` of these operands, plus the adapters in ``rows``, before activation and residual.

    Allocates the result and what is between the kernels; never synchronises.
    """
    check_shapes(gemm)
    config = choose_kernel(gemm, adapters=True)
    if config != "torch" and can_fuse(config, gemm, weights):
        return run_lora_kernels(config, gemm, weights, rows)
    return lora_linear_apart(gemm, weights, rows)


def lora_linear_apart(gemm: Gemm, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """The operators one after the other: for other devices and shapes, and as the reference."""
    x, weight, bias, norm, gated, residual, activation = gemm
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    small = shrink(x, weights, rows)
    if not gated:
        y = linear(x, weight, bias, residual=residual)
        expand(y, small, weights, rows)
        return y
    y = linear(x, weight, bias)
    if activation == "silu":
        y = expand_gated(y, small, weights, rows)
    else:
        expand(y, small, weights, rows)
        y = activate_and_mul(y, activation)
    return y if residual is None else y + residual


def can_fuse(config: TileConfig, gemm: Gemm, weights: LoraWeights) -> bool:
    """Whether the GEMM's kernel can add the adapters: every tile has columns of one part."""
    if weights.rank > _group_width(config) or weights.b.dtype != gemm.x.dtype:
        return False
    widths = weights.widths
    if gemm.gated:
        return len(widths) == 1 or (len(widths) == 2 and widths[0] == widths[1])
    starts = list(accumulate(widths))[:-1]
    return len(widths) <= 3 and all(start % config.block_n == 0 for start in starts)


def _group_width(config: TileConfig) -> int:
    """Ranks of all adapters that a program multiplies at once: as many as 8 wgmma take.

    Each of those needs 4 of the 63 uniform registers for the whole loop over groups.
    """
    return _MOST_RANK // max(1, config.block_n // (16 * config.num_warps))


# --- our kernels: CPU tensors are for the tests, under Triton's interpreter -----------------------


def run_lora_kernels(
    config: TileConfig, gemm: Gemm, weights: LoraWeights, rows: LoraRows
) -> torch.Tensor:
    """``lora_linear`` in two kernels, if it ``can_fuse``; a norm is part of one of them."""
    x, norm = gemm.x, gemm.norm
    scales = None
    if x.shape[0] == 1:
        small = _shrink_row(gemm, weights, rows)
        constants = _constants(small.shape[0], weights, group=1, num_groups=1)
        return run_kernel(config, gemm, LoraTerm(weights.b, small, None, *rows, constants))
    if norm is None:
        small = triton_shrink(x, weights, rows)
    else:
        small, normed, scales = _norm_and_shrink(gemm, weights, rows)
        gemm = gemm._replace(x=normed, norm=None)
    num_slots = weights.b.shape[0]
    # The programs of a tile share its adapters, as they share its inputs.
    most = _group_width(config) // weights.rank
    group = min(most, next_power_of_2(-(-num_slots // config.split_k)))
    num_groups = -(-num_slots // (group * config.split_k))
    constants = _constants(small.shape[0], weights, group, num_groups)
    # No more than there are slots, so that ``num_groups`` holds.
    term = LoraTerm(weights.b, small, scales, rows.slots, rows.active[:num_slots], constants)
    return run_kernel(_prefetching(config, gemm), gemm, term)


def _constants(splits: int, weights: LoraWeights, group: int, num_groups: int) -> tuple[int, ...]:
    """As ``ops.gemm.triton.lora_in_gemm`` lists them."""
    ends, parts = list(accumulate(weights.widths)), len(weights.widths)
    columns = (ends[0], ends[min(1, parts - 1)])
    return (weights.rank, splits, parts, *columns, group, int(num_groups > 1))


def _prefetching(config: TileConfig, gemm: Gemm) -> TileConfig:
    """``config`` with more of the weight prefetched: a wait for ``shrink`` is a longer one.

    Not where programs queue for SMs: most of them start later.
    """
    parts = 2 if gemm.gated else 1
    tile = parts * config.block_n * config.block_k * gemm.weight.itemsize
    num_programs = -(-gemm.weight.shape[0] // (parts * config.block_n)) * config.split_k
    if num_programs > 2 * num_sms(gemm.x.device):
        return config
    return config._replace(prefetch=max(config.prefetch, _PREFETCH_BYTES // tile))


def _shrink_row(gemm: Gemm, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    """[splits, 1, parts * R] in float32, of x times the norm's weight."""
    from ostinato.ops.gemm.triton.lora_shrink import lora_shrink_row_kernel

    x, norm = gemm.x, gemm.norm
    inner, num_ranks = x.shape[1], weights.a.shape[1]
    block_k = max(_ROW_BLOCK_K, next_power_of_2(-(-inner // _MOST_ROW_SPLITS)))
    splits = -(-inner // block_k)
    small = torch.empty((splits, 1, num_ranks), dtype=torch.float32, device=x.device)
    block_r = 16  # divides any rank
    launch(
        lora_shrink_row_kernel,
        (num_ranks // block_r, splits),
        (x, None if norm is None else norm.weight, weights.a, rows.slots, small),
        K=inner,
        ROWS=num_ranks,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **overlap(x.device),
        num_warps=min(16, block_k // 128),
    )
    return small


def _norm_and_shrink(
    gemm: Gemm, weights: LoraWeights, rows: LoraRows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of several rows: what ``shrink`` returns without 1 / rms, norm(x), and 1 / rms [T]."""
    from ostinato.ops.gemm.triton.lora_shrink import lora_norm_shrink_kernel

    x, norm = gemm.x, gemm.norm
    assert norm is not None
    (num_rows, inner), num_ranks = x.shape, weights.a.shape[1]
    splits, tile = num_splits(num_rows, inner, weights.rank), min(weights.rank, RANK_TILE)
    small = torch.empty((splits, num_rows, num_ranks), dtype=torch.float32, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_active, pieces = rows.active.shape[0], num_ranks // tile
    launch(
        lora_norm_shrink_kernel,
        (num_active * pieces * splits + num_rows,),
        (x, norm.weight, weights.a, rows.slots, rows.active, small, normed, scales),
        (norm.eps, num_rows, x.stride(0), num_active),
        K=inner,
        PARTS=pieces,
        BLOCK_K=128,
        RANK=tile,
        SPLITS=splits,
        BLOCK_M=max(16, row_class(num_rows)),
        **overlap(x.device),
        # Little memory, so that two programs fit on an SM beside the previous GEMM's.
        num_warps=4,
        num_stages=3,
    )
    return small, normed, scales
