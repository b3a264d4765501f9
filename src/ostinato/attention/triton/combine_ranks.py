# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Attention over all keys, from that over each rank's keys and its log-sum-exp, in one kernel.

The reference is ``parallel.context.context_parallel.combine``. Launched without overlap: a
collective comes before it, perhaps on another stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ostinato.attention.triton.softmax import LOG2_E
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import can_overlap, launch, next_power_of_2


@triton.jit(do_not_specialize=["num_reqs"])
def combine_ranks_kernel(
    parts,
    out,
    query_start_loc,
    num_reqs,
    rank_stride,
    head_stride,
    token_stride,
    out_token_stride,
    out_head_stride,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and head. Zeros to ``out`` where no rank has a key, and to padding."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rank = tl.arange(0, SIZE_PAD)
    e = tl.arange(0, VALUE_PAD)
    row = parts + rank.to(tl.int64) * rank_stride + head * head_stride + token * token_stride
    owned = token < tl.load(query_start_loc + num_reqs)  # nothing was written for the others
    lse = tl.load(row + VALUE_DIM, mask=(rank < SIZE) & owned, other=float("-inf"))
    filled = lse > float("-inf")
    there = filled[:, None] & (e < VALUE_DIM)[None, :]
    values = tl.load(row[:, None] + e[None, :], mask=there, other=0.0)
    highest = tl.max(lse, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((lse - base) * LOG2_E)
    total = tl.sum(weights, axis=0)
    values = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out + token * out_token_stride + head * out_head_stride + e
    tl.store(target, values.to(out.dtype.element_ty), mask=e < VALUE_DIM)


def combine_ranks(parts: torch.Tensor, query_start_loc: torch.Tensor, out: torch.Tensor) -> None:
    """Write all of ``out`` [T, num_heads, value_dim].

    ``parts`` [ranks, num_heads, T, more than value_dim] float32: values, with the log-sum-exp
    behind them. Values are not read where that is -inf, and nothing is of tokens of no request.
    """
    num_tokens, num_heads, value_dim = out.shape
    size = parts.shape[0]
    launch(
        combine_ranks_kernel,
        (num_tokens, num_heads),
        (parts, out, query_start_loc),
        (query_start_loc.shape[0] - 1, *parts.stride()[:3], *out.stride()[:2]),
        SIZE=size,
        SIZE_PAD=next_power_of_2(size),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded_row(value_dim),
        OVERLAP=can_overlap(out.device),
        num_warps=1,
    )
