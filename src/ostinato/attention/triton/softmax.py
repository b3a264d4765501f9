# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The softmax of split-KV attention, to base 2: its logits, and how parts are combined.

A part is the softmax over a share of the keys: the weighted sum of values, the highest logit, and
the sum of the weights, in float32. ``decode_kernel`` combines the parts of a request and KV head
with ``combine_parts``; those of ``attend_kernel`` are combined by a kernel of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.tile_config import padded_row
from ostinato.ops.triton.launch import launch, overlap

LOG2_E = tl.constexpr(1.4426950408889634)
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def logits(scores, scale, soft_cap):
    """Scaled and capped scores, times log2(e): the softmax takes powers of 2."""
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities.
        doubled = tl.exp2(scores * (scale / soft_cap * 2.0 * LOG2_E))
        scores = (1.0 - 2.0 / (1.0 + doubled)) * (soft_cap * LOG2_E)
    else:
        scores = scores * (scale * LOG2_E)
    return scores


@triton.jit
def tile_weights(scores, highest, total):
    """The weights of a tile's logits; the rows' new highest and total; how much old sums fade."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # -inf minus -inf would be NaN; rows that have seen no key have nothing to rescale.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(highest - base)
    return weights, new_highest, total * faded + tl.sum(weights, axis=1), faded


@triton.jit
def log_sum_exp(highest, total):
    """To base e, of logits to base 2; -inf where there is none."""
    return (highest + tl.log2(tl.where(total > 0.0, total, 1.0))) / LOG2_E


@triton.jit
def combine_parts(
    partial_values,
    partial_highest,
    partial_total,
    start,
    count,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The softmax over ``count`` parts from index ``start`` on: [ROWS, VALUE_PAD].

    Other programs wrote them, so they are read from L2.
    """
    row = tl.arange(0, ROWS)
    e = tl.arange(0, VALUE_PAD)
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    values = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    for first in range(0, count, CHUNK):
        part = first + tl.arange(0, CHUNK)
        there = (part < count)[:, None] & (row < GROUP)[None, :]
        index = (start + part)[:, None] * GROUP + row[None, :]
        peaks = tl.load(
            partial_highest + index, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        totals = tl.load(partial_total + index, mask=there, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial_values + (index * HEAD_DIM)[:, :, None] + e[None, None, :],
            mask=there[:, :, None] & (e < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        zero = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows of no head
        weights = tl.exp2(peaks - zero[None, :])
        faded = tl.exp2(highest - zero)
        total = total * faded + tl.sum(totals * weights, axis=0)
        values = values * faded[:, None] + tl.sum(sums * weights[:, :, None], axis=0)
        highest = new_highest
    return values / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_reqs"])
def combine_kernel(
    partial_values,
    partial_highest,
    partial_total,
    out,
    query_start_loc,
    num_reqs,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    LSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and head: the softmax over all splits, to ``out``.

    With LSE the log-sum-exp goes to the column behind the values.
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_wait()
    if token >= tl.load(query_start_loc + num_reqs):
        return  # nothing was written for it
    split = (token * NUM_HEADS + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    e = tl.arange(0, VALUE_PAD)
    highest = tl.load(partial_highest + split)
    total = tl.load(partial_total + split)
    filled = highest > float("-inf")
    there = filled[:, None] & (e < VALUE_DIM)[None, :]
    values = tl.load(
        partial_values + (split * VALUE_DIM)[:, None] + e[None, :], mask=there, other=0.0
    )
    base = tl.max(highest, axis=0)
    weights = tl.where(filled, tl.exp2(highest - tl.where(base == float("-inf"), 0.0, base)), 0.0)
    total = tl.sum(total * weights, axis=0)
    values = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out + token * out_token_stride + head * out_head_stride + e
    tl.store(target, values.to(out.dtype.element_ty), mask=e < VALUE_DIM)
    if LSE:
        row_end = out + token * out_token_stride + head * out_head_stride + VALUE_DIM
        tl.store(row_end, log_sum_exp(base, total))


def empty_parts(num_parts: int, value_dim: int, device: torch.device) -> Parts:
    """Weighted sums of values, highest logits, sums of weights."""
    values = torch.empty((num_parts, value_dim), device=device, dtype=torch.float32)
    highest, total = torch.empty((2, num_parts), device=device, dtype=torch.float32).unbind()
    return values, highest, total


def combine(parts: Parts, batch: PagedBatch, num_splits: int, *, lse: bool = False) -> None:
    """Combine parts [T, num_heads, num_splits] of every token of a request into ``batch.out``.

    ``lse``: the log-sum-exp goes behind the values of each row.
    """
    out, query_start_loc = batch.out, batch.query_start_loc
    num_tokens, num_heads, value_dim = out.shape
    launch(
        combine_kernel,
        (num_tokens, num_heads),
        (*parts, out, query_start_loc),
        (query_start_loc.shape[0] - 1, *out.stride()[:2]),
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=padded_row(value_dim),
        NUM_SPLITS=num_splits,
        LSE=lse,
        **overlap(out.device),
        num_warps=4,
    )
