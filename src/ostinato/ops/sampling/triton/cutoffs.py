# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The middle of the search described in ``filters``: which bins and tokens can be the cutoff."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.sampling.triton.filters import (
    ARRIVED,
    BINS,
    FIRST_BIN,
    FULL_WEIGHT,
    HIGHEST,
    LARGEST_INT,
    LAST_BIN,
    LISTED,
    NUM_FIELDS,
    RANK,
    SCALE,
    WIDTH,
    bin_of,
    filters,
    key_of,
    load_float,
    load_scores,
    reach_of,
    weight,
)
from ostinato.ops.triton.dependent_launch import wait_for_previous

# More than the relative error of the row's total in float32 and of two sums over the bins, in any
# order of their terms.
ROUNDING = tl.constexpr(1e-4)


@triton.jit
def _bracket(count, total, width, top_k, top_p, CAPACITY: tl.constexpr):
    """The first and last bin that the cutoff can be in, and how many of their tokens top-k keeps.

    The latter is 0 if top-k keeps all that are in reach. A weight is known up to its bin's width,
    so sums of weights are known between two bounds: added up from the front or, better for a large
    top-p, subtracted from ``total`` (0: unknown), in units of the most likely token's weight.
    """
    every_bin = tl.arange(0, BINS)
    reached = tl.cumsum(count, axis=0)
    is_cut = (top_k > 0) & (tl.max(reached, axis=0) >= top_k)
    last = tl.where(is_cut, tl.sum((reached < top_k).to(tl.int32), axis=0), BINS - 1)
    up_to_last = tl.sum(tl.where(every_bin <= last, count, 0), axis=0)
    first = tl.where(top_p < 1.0, 0, last)  # top-k alone looks at one bin
    if (top_p < 1.0) & (up_to_last > CAPACITY):
        kept = tl.where(is_cut, top_k - (reached - count), count)
        at_least = tl.maximum(tl.minimum(kept, count), 0).to(tl.float32)
        at_most = tl.where(every_bin <= last, count, 0).to(tl.float32)
        steps = every_bin.to(tl.float32)
        lightest = tl.maximum(tl.exp(-(steps + 1.0) * width) - 1.0 / FULL_WEIGHT, 0.0)
        lightest = tl.where(every_bin == BINS - 1, 0.0, lightest) * at_least
        heaviest = tl.exp(-steps * width) * at_most
        least, most = tl.cumsum(lightest, axis=0), tl.cumsum(heaviest, axis=0)
        total_least, total_most = tl.sum(lightest, axis=0), tl.sum(heaviest, axis=0)
        if (total > 0.0) & (is_cut == 0):
            least_after, most_after = total_least - least, total_most - most
            least = tl.maximum(least, total - most_after)
            most = tl.minimum(most, total - least_after)
            total_least = total
            total_most = total
        # Room for the rounding of these sums. What is subtracted from the total has the total's
        # rounding, which a factor alone does not cover if top-p is small.
        first = tl.sum((most < (top_p * 0.9995 - ROUNDING) * total_least).to(tl.int32), axis=0)
        first = tl.minimum(first, last)
        end = tl.sum((least < (top_p * 1.0005 + ROUNDING) * total_most).to(tl.int32), axis=0)
        last = tl.where(is_cut, last, tl.minimum(end, last))
    before = tl.sum(tl.where(every_bin < first, count, 0), axis=0)
    return first, last, tl.where(is_cut, top_k - before, 0)


@triton.jit(do_not_specialize=["chunk_size", "num_chunks"])
def histogram_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    counts,
    fields,
    totals,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    chunk_size,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHANGED: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk: adds its tokens to the row's ``counts``.

    Their weight goes to ``totals`` [B, chunks], in float32; ``ROUNDING`` covers its error. The last
    program of a row finds the bins that the cutoff can be in.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    temperature, top_k, top_p, _, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    if is_filtered & ((top_k > 0) | (top_p < 1.0)):
        row_is_changed = tl.load(is_changed + row) if CHANGED else 0
        its_fields = fields + row * NUM_FIELDS
        highest, scale = load_float(its_fields + HIGHEST), load_float(its_fields + SCALE)
        # A list of all that top-k keeps has the weights, if they are few.
        has_total = (top_p < 1.0) & ((top_k == 0) | (top_k > CAPACITY))
        reach = reach_of(temperature)
        lane = tl.arange(0, BLOCK)
        count = tl.zeros([BINS], dtype=tl.int32)
        total = tl.full([], 0.0, tl.float32)
        num_blocks = chunk_size // BLOCK
        for block in tl.range(chunk * num_blocks, (chunk + 1) * num_blocks):
            column = block * BLOCK + lane
            score = load_scores(
                logits + row * row_stride,
                changed + row * vocab_size,
                row_is_changed,
                column,
                vocab_size,
                CHANGED,
            )
            step, within = bin_of(score, highest, reach, scale)
            within = within & (column < vocab_size)
            count += tl.histogram(tl.where(within, step, 0.0).to(tl.int32), BINS, mask=within)
            if has_total:
                share = tl.exp((score - highest) * (1.0 / temperature))
                total += tl.sum(tl.where(within, share, 0.0), axis=0)
        every_bin = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + every_bin, count, mask=count > 0, sem="relaxed")
        tl.store(totals + row * num_chunks + chunk, total)
        tl.debug_barrier()  # all threads have added before one counts the program
        arrived = tl.atomic_add(its_fields + ARRIVED, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            count = tl.load(counts + row * BINS + every_bin, cache_modifier=".cg")
            every_chunk = tl.arange(0, CHUNKS_PAD)
            place = totals + row * num_chunks + every_chunk
            parts = tl.load(place, mask=every_chunk < num_chunks, other=0.0, cache_modifier=".cg")
            width = load_float(its_fields + WIDTH)
            first_bin, last_bin, rank = _bracket(
                count, tl.sum(parts, axis=0), width, top_k, top_p, CAPACITY
            )
            tl.store(its_fields + FIRST_BIN, first_bin)
            tl.store(its_fields + LAST_BIN, last_bin)
            tl.store(its_fields + RANK, rank)


@triton.jit(do_not_specialize=["chunk_size", "num_chunks"])
def collect_candidates_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    fields,
    sums,
    spans,
    listed,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    chunk_size,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk: lists its tokens of the bins that the cutoff can be in.

    A list entry is one int64, key above and token below. A list that would exceed
    ``CAPACITY`` is cut short; its length in ``fields`` is not. Also writes ``spans`` [B, chunks,
    3], the number of the chunk's candidates, their smallest and their largest key, and ``sums``
    [B, chunks, 2], the exact weights of all its tokens and of those in earlier bins, or 0 if the
    list has what top-p needs.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    temperature, top_k, top_p, _, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    its_fields = fields + row * NUM_FIELDS
    highest = load_float(its_fields + HIGHEST)
    is_finite = (highest - highest) == 0.0  # other rows need no list
    if is_filtered & is_finite & ((top_k > 0) | (top_p < 1.0)):
        row_is_changed = tl.load(is_changed + row) if CHANGED else 0
        reach = reach_of(temperature)
        scale = load_float(its_fields + SCALE)
        first_bin, last_bin = tl.load(its_fields + FIRST_BIN), tl.load(its_fields + LAST_BIN)
        rank = tl.load(its_fields + RANK)
        from_step = first_bin.to(tl.float32)
        to_step = (last_bin + 1).to(tl.float32)
        has_sums = (top_p < 1.0) & ((first_bin > 0) | ((rank == 0) & (last_bin < BINS - 1)))
        num_blocks = chunk_size // BLOCK
        lane = tl.arange(0, BLOCK)
        weight_of_all = tl.zeros([BLOCK], dtype=tl.int64)
        weight_before = tl.zeros([BLOCK], dtype=tl.int64)
        num_listed = tl.zeros([BLOCK], dtype=tl.int32)
        smallest = tl.full([BLOCK], LARGEST_INT, tl.int32)
        largest = tl.full([BLOCK], -1, tl.int32)
        for block in tl.range(chunk * num_blocks, (chunk + 1) * num_blocks):
            column = block * BLOCK + lane
            score = load_scores(
                logits + row * row_stride,
                changed + row * vocab_size,
                row_is_changed,
                column,
                vocab_size,
                CHANGED,
            )
            step, within = bin_of(score, highest, reach, scale)
            key = key_of(score, highest)
            if has_sums:
                amount = weight(key, temperature)  # 0 if not in reach
                weight_of_all += amount
                weight_before += tl.where(step < from_step, amount, 0)
            is_listed = within & (step >= from_step) & (step < to_step)
            num_listed += is_listed.to(tl.int32)
            smallest = tl.where(is_listed, tl.minimum(smallest, key), smallest)
            largest = tl.where(is_listed, tl.maximum(largest, key), largest)
        its_sums = sums + (row * num_chunks + chunk) * 2
        tl.store(its_sums, tl.sum(weight_of_all, axis=0))
        tl.store(its_sums + 1, tl.sum(weight_before, axis=0))
        num_candidates = tl.sum(num_listed, axis=0)
        its_span = spans + (row * num_chunks + chunk) * 3
        tl.store(its_span, num_candidates)
        if num_candidates > 0:
            tl.store(its_span + 1, tl.min(smallest, axis=0))
            tl.store(its_span + 2, tl.max(largest, axis=0))
            # One scan for all blocks: each lane gets as many places as it lists tokens.
            place = tl.atomic_add(its_fields + LISTED, num_candidates, sem="relaxed")
            place += tl.cumsum(num_listed, axis=0) - num_listed
            first = chunk * chunk_size
            # Not multiples of BLOCK to the compiler: a thread gets no adjacent columns, and what it
            # stores need not pass through shared memory.
            for start in tl.range(first, tl.minimum(first + chunk_size, vocab_size), BLOCK):
                column = start + lane
                score = load_scores(
                    logits + row * row_stride,
                    changed + row * vocab_size,
                    row_is_changed,
                    column,
                    vocab_size,
                    CHANGED,
                )
                step, within = bin_of(score, highest, reach, scale)
                is_listed = within & (step >= from_step) & (step < to_step)
                candidate = (key_of(score, highest).to(tl.int64) << 32) | column
                fits = is_listed & (place < CAPACITY)
                tl.store(listed + row * CAPACITY + place, candidate, mask=fits)
                place += is_listed.to(tl.int32)
        else:
            tl.store(its_span + 1, LARGEST_INT)
            tl.store(its_span + 2, -1)
