# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Samples from what the cutoffs of ``cutoffs`` and min-p leave: the best token of each chunk.

``sampling.best_of_all_kernel`` then takes the best of all chunks. Where rows are sampled again,
``store_resampled_kernel`` stores the tokens of those that are filtered or changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.sampling.triton.filters import (
    CUT_KEY,
    CUT_TOKEN,
    HIGHEST,
    LARGEST_INT,
    NUM_FIELDS,
    filters,
    key_of,
    likelihood,
    load_float,
    load_scores,
)
from ostinato.ops.sampling.triton.sampling import exponential_log, ordered, row_of_noise
from ostinato.ops.triton.dependent_launch import wait_for_previous

SEED_KEY = tl.constexpr(1)  # column of the sampling state's integers


@triton.jit(do_not_specialize=["blocks_per_chunk", "num_chunks"])
def best_kept_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    lengths,
    floats,
    ints,
    fields,
    candidates,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    blocks_per_chunk,
    num_chunks,
    FILTERED: tl.constexpr,
    CHANGED: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk: writes its best candidate to [B, chunks].

    AGAIN: rows that are neither filtered nor changed are skipped, and get any candidate.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    temperature, _, _, min_p, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    row_is_changed = tl.load(is_changed + row) if CHANGED else 0
    highest = tl.full([], 0.0, tl.float32)
    cut_key = tl.full([], LARGEST_INT, tl.int32)  # without filters NaN is kept, too
    cut_token = tl.full([], LARGEST_INT, tl.int32)
    is_filtered = is_filtered & FILTERED
    if FILTERED:  # noqa: SIM102 (without filters there are no fields, and no code to read them)
        if is_filtered:
            its_fields = fields + row * NUM_FIELDS
            highest = load_float(its_fields + HIGHEST)
            cut_key = tl.load(its_fields + CUT_KEY)
            cut_token = tl.load(its_fields + CUT_TOKEN)
    seed_key = tl.load(ints + req_index * int_stride + SEED_KEY)
    offset, multiplier = row_of_noise(seed_key, tl.load(lengths + row))
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    first = chunk * blocks_per_chunk
    num_blocks = blocks_per_chunk
    if AGAIN:
        num_blocks = tl.where(is_filtered | (row_is_changed != 0), blocks_per_chunk, 0)
    token = first * BLOCK + lane
    for block in tl.range(first, first + num_blocks):
        column = block * BLOCK + lane
        score = load_scores(
            logits + row * row_stride,
            changed + row * vocab_size,
            row_is_changed,
            column,
            vocab_size,
            CHANGED,
        )
        any_kept = tl.full([], 1, tl.int32)
        if is_filtered:
            key = key_of(score, highest)
            kept = (key < cut_key) | ((key == cut_key) & (column <= cut_token))
            if min_p > 0.0:
                kept = kept & ((likelihood(key, temperature) < min_p) == 0)
            score = tl.where(kept, score, float("-inf"))
            any_kept = tl.max(kept.to(tl.int32), axis=0)
        if any_kept != 0:
            if temperature > 0.0:
                score = score - exponential_log(column, offset, multiplier) * temperature
            better = (score > best) | ((score != score) & (best == best))
            best = tl.where(better, score, best)
            token = tl.where(better, column, token)
    tl.store(candidates + row * num_chunks + chunk, tl.max(ordered(best, token), axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def store_resampled_kernel(
    chosen,
    is_changed,
    req_indices,
    lengths,
    floats,
    ints,
    token_ids,
    tokens,
    float_stride,
    int_stride,
    token_ids_stride,
    vocab_size,
    num_rows,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK rows: stores the tokens of rows that are filtered or changed."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    req_index = tl.load(req_indices + row, mask=inside, other=0)
    stores = filters(floats, ints, req_index, float_stride, int_stride, vocab_size)[4]
    if CHANGED:
        stores = stores | (tl.load(is_changed + row, mask=inside, other=0) != 0)
    stores = stores & inside
    token = tl.load(chosen + row, mask=stores, other=0)
    length = tl.load(lengths + row, mask=stores, other=0)
    tl.store(tokens + row, token, mask=stores)
    tl.store(token_ids + req_index * token_ids_stride + length, token.to(tl.int32), mask=stores)
