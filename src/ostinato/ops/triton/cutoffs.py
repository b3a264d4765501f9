# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The second half of the search described in ``filters``: from the bins' counts to the cutoffs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.ops.triton.filters import (
    BINS,
    CUT_KEY,
    CUT_TOKEN,
    FIRST_BIN,
    FULL_WEIGHT,
    HIGHEST,
    INFINITE_KEY,
    LARGEST_INT,
    LAST_BIN,
    LISTED,
    NUM_FIELDS,
    RANK,
    bin_of,
    bins_per_logit,
    filters,
    key_of,
    load_scores,
    row_range,
    weight,
)

# More than the relative error of two float32 sums over the bins, in any order of their terms.
ROUNDING = tl.constexpr(4e-5)


@triton.jit
def _bracket(count, total, width, top_k, top_p, CAPACITY: tl.constexpr):
    """The first and last bin that the cutoff can be in, and how many of their tokens top-k keeps.

    The latter is 0 if top-k keeps all that are in reach. A weight is known up to its bin's width,
    so sums of weights are known between two bounds: added up from the front or, better for a large
    top-p, subtracted from the exact ``total`` (0: unknown).
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
        if (total > 0) & (is_cut == 0):
            exact = total.to(tl.float32) / FULL_WEIGHT
            least_after, most_after = total_least - least, total_most - most
            least = tl.maximum(least, exact - most_after)
            most = tl.minimum(most, exact - least_after)
            total_least = exact
            total_most = exact
        # Room for the rounding of these sums. What is subtracted from the total has the total's
        # rounding, which a factor alone does not cover if top-p is small.
        first = tl.sum((most < (top_p * 0.9995 - ROUNDING) * total_least).to(tl.int32), axis=0)
        first = tl.minimum(first, last)
        end = tl.sum((least < (top_p * 1.0005 + ROUNDING) * total_most).to(tl.int32), axis=0)
        last = tl.where(is_cut, last, tl.minimum(end, last))
    before = tl.sum(tl.where(every_bin < first, count, 0), axis=0)
    return first, last, tl.where(is_cut, top_k - before, 0)


@triton.jit(do_not_specialize=["blocks_per_chunk", "num_chunks"])
def collect_candidates_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    ranges,
    counts,
    sums,
    fields,
    listed_keys,
    listed_tokens,
    listed_weights,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    blocks_per_chunk,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHANGED: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk: lists its tokens of the bins that the cutoff can be in.

    A list that would exceed ``CAPACITY`` is cut short; its length in ``fields`` is not.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row)
    temperature, top_k, top_p, _, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    if is_filtered & ((top_k > 0) | (top_p < 1.0)):
        row_is_changed = tl.load(is_changed + row) if CHANGED else 0
        highest, lowest = row_range(ranges, row, num_chunks, CHUNKS_PAD)
        scale, width = bins_per_logit(highest, lowest, temperature)
        count = tl.load(counts + row * BINS + tl.arange(0, BINS))
        first_bin, last_bin, rank = _bracket(
            count, tl.load(sums + row * 2), width, top_k, top_p, CAPACITY
        )
        if tl.program_id(1) == 0:
            tl.store(fields + row * NUM_FIELDS + FIRST_BIN, first_bin)
            tl.store(fields + row * NUM_FIELDS + LAST_BIN, last_bin)
            tl.store(fields + row * NUM_FIELDS + RANK, rank)
        has_sum = (first_bin > 0) & (top_p < 1.0)
        lane = tl.arange(0, BLOCK)
        before = tl.zeros([BLOCK], dtype=tl.int64)
        first = tl.program_id(1) * blocks_per_chunk
        for block in tl.range(first, first + blocks_per_chunk):
            column = block * BLOCK + lane
            score = load_scores(
                logits + row * row_stride,
                changed + row * vocab_size,
                row_is_changed,
                column,
                vocab_size,
                CHANGED,
            )
            step, within = bin_of(score, highest, temperature, scale)
            within = within & (column < vocab_size)
            key = key_of(score, highest)
            is_listed = (within & (step >= first_bin) & (step <= last_bin)).to(tl.int32)
            num_listed = tl.sum(is_listed, axis=0)
            amount = tl.zeros([BLOCK], dtype=tl.int64)
            if (top_p < 1.0) & (has_sum | (num_listed > 0)):
                amount = weight(key, temperature)
                before += tl.where(within & (step < first_bin), amount, 0)
            if num_listed > 0:
                start = tl.atomic_add(fields + row * NUM_FIELDS + LISTED, num_listed)
                place = start + tl.cumsum(is_listed, axis=0) - 1
                fits = (is_listed != 0) & (place < CAPACITY)
                tl.store(listed_keys + row * CAPACITY + place, key, mask=fits)
                tl.store(listed_tokens + row * CAPACITY + place, column, mask=fits)
                tl.store(listed_weights + row * CAPACITY + place, amount, mask=fits)
        if has_sum:
            tl.atomic_add(sums + row * 2 + 1, tl.sum(before, axis=0))


KEYS, WEIGHTS, TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _candidates(
    start, source, WITH_WEIGHTS: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr
):
    """Keys, tokens and weights of a block of the list, or of the row if the list is incomplete.

    What is not a candidate has the largest key and weight 0.
    """
    is_complete, size, keys, tokens, weights, row, changed_row, is_changed, vocab_size = source[:9]
    highest, temperature, scale, first_bin, last_bin = source[9:]
    place = start + tl.arange(0, BLOCK)
    amount = tl.zeros([BLOCK], dtype=tl.int64)
    if is_complete:
        inside = place < size
        key = tl.load(keys + place, mask=inside, other=LARGEST_INT)
        token = tl.load(tokens + place, mask=inside, other=0)
        if WITH_WEIGHTS:
            amount = tl.load(weights + place, mask=inside, other=0)
    else:
        score = load_scores(row, changed_row, is_changed, place, vocab_size, CHANGED)
        step, within = bin_of(score, highest, temperature, scale)
        inside = within & (step >= first_bin) & (step <= last_bin) & (place < vocab_size)
        key = tl.where(inside, key_of(score, highest), LARGEST_INT)
        token = place
        if WITH_WEIGHTS:
            amount = tl.where(inside, weight(key, temperature), 0)
    return key, token, amount


@triton.jit
def _measure(
    source,
    end,
    key_limit,
    token_limit,
    WHAT: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Candidates up to a key: their number, or their weights. Or those with that key up to a token.

    An int64.
    """
    result = tl.zeros([BLOCK], dtype=tl.int64)
    for start in tl.range(0, end, BLOCK):
        key, token, amount = _candidates(start, source, WHAT == WEIGHTS, CHANGED, BLOCK)
        if WHAT == WEIGHTS:
            result += tl.where(key <= key_limit, amount, 0)
        elif WHAT == TIES:
            result += ((key == key_limit) & (token <= token_limit)).to(tl.int64)
        else:
            result += (key <= key_limit).to(tl.int64)
    return tl.sum(result, axis=0)


@triton.jit
def _smallest(
    source,
    end,
    low,
    high,
    key,
    target,
    WHAT: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest limit in [low, high] at which ``_measure`` reaches ``target``, else ``high``."""
    while low < high:
        middle = low + (high - low) // 2
        if WHAT == TIES:
            measured = _measure(source, end, key, middle, WHAT, CHANGED, BLOCK)
        else:
            measured = _measure(source, end, middle, 0, WHAT, CHANGED, BLOCK)
        high = tl.where(measured >= target, middle, high)
        low = tl.where(measured >= target, low, middle + 1)
    return high


@triton.jit(do_not_specialize=["num_chunks"])
def find_cutoff_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    ranges,
    counts,
    sums,
    fields,
    listed_keys,
    listed_tokens,
    listed_weights,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHANGED: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: writes the last key that is kept, and the last token with it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row)
    temperature, top_k, top_p, min_p, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    if is_filtered:
        highest, lowest = row_range(ranges, row, num_chunks, CHUNKS_PAD)
        cut_key = tl.full([], INFINITE_KEY, tl.int32)
        cut_token = tl.full([], LARGEST_INT, tl.int32)
        its_fields = fields + row * NUM_FIELDS
        if (highest - highest) != 0.0:
            # As in the reference: a row with NaN, or with nothing but -inf, keeps no token, and
            # +inf comes after all others.
            num_infinite = tl.load(counts + row * BINS, mask=top_k > 0, other=0)
            keeps = (top_k > 0) & (top_k <= vocab_size - num_infinite) & (min_p <= 0.0)
            cut_key = tl.where((highest == float("inf")) & keeps, INFINITE_KEY, -1)
        elif (top_k > 0) | (top_p < 1.0):
            row_is_changed = tl.load(is_changed + row) if CHANGED else 0
            scale = bins_per_logit(highest, lowest, temperature)[0]
            rank = tl.load(its_fields + RANK)
            size = tl.load(its_fields + LISTED)
            last_bin = tl.load(its_fields + LAST_BIN)
            is_complete = size <= CAPACITY
            end = tl.where(is_complete, size, vocab_size)
            source = (
                is_complete,
                size,
                listed_keys + row * CAPACITY,
                listed_tokens + row * CAPACITY,
                listed_weights + row * CAPACITY,
                logits + row * row_stride,
                changed + row * vocab_size,
                row_is_changed,
                vocab_size,
                highest,
                temperature,
                scale,
                tl.load(its_fields + FIRST_BIN),
                last_bin,
            )
            smallest = tl.full([BLOCK], LARGEST_INT, dtype=tl.int32)
            largest = tl.zeros([BLOCK], dtype=tl.int32)
            for start in tl.range(0, end, BLOCK):
                key = _candidates(start, source, False, CHANGED, BLOCK)[0]
                smallest = tl.minimum(smallest, key)
                largest = tl.maximum(largest, tl.where(key == LARGEST_INT, 0, key))
            low, high = tl.min(smallest, axis=0), tl.max(largest, axis=0)
            if rank > 0:
                high = _smallest(source, end, low, high, 0, rank, KEYS, CHANGED, BLOCK)
                cut_key = high
            if top_p < 1.0:
                before = tl.load(sums + row * 2 + 1)
                total = before + _measure(source, end, high, 0, WEIGHTS, CHANGED, BLOCK)
                if (rank == 0) & (last_bin < BINS - 1):  # the list ends before the row does
                    total = tl.load(sums + row * 2)
                needed = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
                needed = tl.maximum(needed, 1) - before
                cut_key = _smallest(source, end, low, high, 0, needed, WEIGHTS, CHANGED, BLOCK)
                less = _measure(source, end, cut_key - 1, 0, WEIGHTS, CHANGED, BLOCK)
                at_most = _measure(source, end, cut_key, 0, WEIGHTS, CHANGED, BLOCK)
                num_ties = _measure(source, end, cut_key, LARGEST_INT, TIES, CHANGED, BLOCK)
                each = tl.maximum((at_most - less) // num_ties, 1)
                wanted = (needed - less + each - 1) // each
                if wanted < num_ties:
                    first = tl.full([], 0, tl.int32)
                    cut_token = _smallest(
                        source,
                        end,
                        first,
                        first + vocab_size,
                        cut_key,
                        wanted,
                        TIES,
                        CHANGED,
                        BLOCK,
                    )
        tl.store(its_fields + CUT_KEY, cut_key)
        tl.store(its_fields + CUT_TOKEN, cut_token)
        tl.store(its_fields + HIGHEST, highest.to(tl.int32, bitcast=True))
