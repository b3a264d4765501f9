# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Two kernels for log-probabilities: sums and group maxima in one pass, then the n most likely.

A row is divided into groups of ``GROUP`` tokens. Logit and token make one int64, ordered as in
``sampling``. The most likely token is the best of all groups' best; the next one is again, once
the best of its group is replaced by the second best of that group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.sampling.triton.sampling import LARGEST_INT, ordered
from ostinato.ops.triton.dependent_launch import wait_for_previous

GROUP = tl.constexpr(128)
SMALLEST = tl.constexpr(-(1 << 63))
NUM_REPORTED = tl.constexpr(4)  # column of the sampling state's integers


@triton.jit
def _num_reported(ints, req_index, int_stride):
    """The number of log-probabilities that a request wants, the chosen token's included."""
    return tl.load(ints + req_index * int_stride + NUM_REPORTED).to(tl.int32)


@triton.jit
def _candidates(logits, column, vocab_size):
    inside = column < vocab_size
    score = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return score, tl.where(inside, ordered(score, column), SMALLEST)


@triton.jit(do_not_specialize=["blocks_per_chunk", "num_chunks"])
def logprob_sums_kernel(
    logits,
    req_indices,
    ints,
    partials,
    group_best,
    row_stride,
    int_stride,
    vocab_size,
    num_groups,
    blocks_per_chunk,
    num_chunks,
    REQUESTED: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk: its highest logit and sum of exponentials to ``partials``
    [B, chunks, 2], and the best of each group to ``group_best`` [B, groups].

    REQUESTED: rows whose request wants no log-probabilities are skipped.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    highest = tl.full([GROUPS, GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUPS, GROUP], dtype=tl.float32)
    first = chunk * blocks_per_chunk
    num_blocks = blocks_per_chunk
    if REQUESTED:
        num_reported = _num_reported(ints, tl.load(req_indices + row), int_stride)
        num_blocks = tl.where(num_reported > 0, blocks_per_chunk, 0)
    for block in tl.range(first, first + num_blocks):
        group = block * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        score, candidate = _candidates(logits + row * row_stride, column, vocab_size)
        place = group_best + row * num_groups + group
        tl.store(place, tl.max(candidate, axis=1), mask=group < num_groups)
        above = tl.maximum(highest, score)
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(highest - base) + tl.exp(score - base)
        highest = above
    top = tl.max(tl.max(highest, axis=1), axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    place = partials + (row * num_chunks + chunk) * 2
    tl.store(place, top)
    tl.store(place + 1, tl.sum(tl.sum(total * tl.exp(highest - base), axis=1), axis=0))


@triton.jit(do_not_specialize=["num_chunks", "num_top"])
def top_logprobs_kernel(
    logits,
    chosen,
    req_indices,
    ints,
    partials,
    group_best,
    logprobs,
    reported,
    row_stride,
    int_stride,
    vocab_size,
    num_groups,
    num_chunks,
    num_top,
    REQUESTED: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: the chosen token and the most likely ones, with log-probabilities.

    REQUESTED: of the ``num_top`` most likely, only as many as the row's request wants.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    its_logits = logits + row * row_stride
    chunk = tl.arange(0, CHUNKS_PAD)
    place = partials + (row * num_chunks + chunk) * 2
    highest = tl.load(place, mask=chunk < num_chunks, other=float("-inf"))
    top = tl.max(highest, axis=0)
    sums = tl.load(place + 1, mask=chunk < num_chunks, other=0.0)
    shift = tl.log(tl.sum(tl.where(chunk < num_chunks, sums * tl.exp(highest - top), 0.0), axis=0))

    out = row * (num_top + 1)
    token = tl.load(chosen + row)
    tl.store(reported + out, token)
    tl.store(logprobs + out, tl.load(its_logits + token).to(tl.float32) - top - shift)
    group = tl.arange(0, GROUPS_PAD)
    place = group_best + row * num_groups + group
    best = tl.load(place, mask=group < num_groups, other=SMALLEST)
    last = num_top
    if REQUESTED:
        num_reported = _num_reported(ints, tl.load(req_indices + row), int_stride)
        last = tl.minimum(num_reported - 1, num_top)
    for rank in tl.range(0, last):
        winner = tl.max(best, axis=0)
        token = (winner & LARGEST_INT) ^ LARGEST_INT
        tl.store(reported + out + 1 + rank, token)
        score = tl.load(its_logits + token).to(tl.float32)
        tl.store(logprobs + out + 1 + rank, score - top - shift)
        its_group = (token // GROUP).to(tl.int32)
        column = its_group * GROUP + tl.arange(0, GROUP)
        _, candidate = _candidates(its_logits, column, vocab_size)
        second = tl.max(tl.where(candidate < winner, candidate, SMALLEST), axis=0)
        best = tl.where(group == its_group, second, best)
