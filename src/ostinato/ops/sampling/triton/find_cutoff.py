# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The last kernel of the search described in ``filters``: the exact cutoff among the candidates.

It bisects keys, and where top-p keeps only some of the tokens that have the last key, those tokens.
Candidates that are listed are in registers, so a step costs a reduction. If they are too many for
the list, a step reads the row, unless they all have the same key: flat rows and rows with few
different logits are not slow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.sampling.triton.filters import (
    BINS,
    CUT_KEY,
    CUT_TOKEN,
    FIRST_BIN,
    HIGHEST,
    INFINITE_KEY,
    LARGEST_INT,
    LAST_BIN,
    LISTED,
    NUM_FIELDS,
    RANK,
    SCALE,
    bin_of,
    filters,
    key_of,
    load_float,
    load_scores,
    reach_of,
    weight,
)
from ostinato.ops.triton.dependent_launch import wait_for_previous

KEYS, WEIGHTS, TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _row_candidates(start, source, CHANGED: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and tokens of a block of the row; what is no candidate has the largest key."""
    row, changed_row, is_changed, vocab_size = source[:4]
    highest, temperature, scale, first_bin, last_bin = source[4:]
    token = start + tl.arange(0, BLOCK)
    score = load_scores(row, changed_row, is_changed, token, vocab_size, CHANGED)
    step, within = bin_of(score, highest, reach_of(temperature), scale)
    step = tl.where(within, step, 0.0).to(tl.int32)
    inside = within & (step >= first_bin) & (step <= last_bin)
    return tl.where(inside, key_of(score, highest), LARGEST_INT), token


@triton.jit
def _measure(
    source,
    begin,
    end,
    key_limit,
    token_limit,
    WHAT: tl.constexpr,
    IN_LIST: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Candidates up to a key: their number, or their weights. Or those with that key up to a token.

    ``source`` is the list, or what to compute the candidates in columns ``begin`` to ``end`` from.
    """
    if IN_LIST:
        keys, tokens, weights = source
        if WHAT == WEIGHTS:
            result = tl.where(keys <= key_limit, weights, 0)
        elif WHAT == TIES:
            result = ((keys == key_limit) & (tokens <= token_limit)).to(tl.int32)
        else:
            result = (keys <= key_limit).to(tl.int32)
    else:
        result = tl.zeros([BLOCK], dtype=tl.int64 if WHAT == WEIGHTS else tl.int32)
        for start in tl.range(begin, end, BLOCK):
            key, token = _row_candidates(start, source, CHANGED, BLOCK)
            if WHAT == WEIGHTS:
                result += tl.where(key <= key_limit, weight(key, source[5]), 0)
            elif WHAT == TIES:
                result += ((key == key_limit) & (token <= token_limit)).to(tl.int32)
            else:
                result += (key <= key_limit).to(tl.int32)
    return tl.sum(result, axis=0)


@triton.jit
def _smallest(
    source,
    begin,
    end,
    low,
    high,
    key,
    target,
    WHAT: tl.constexpr,
    IN_LIST: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest limit in [low, high] at which ``_measure`` reaches ``target``, else ``high``."""
    while low < high:
        middle = low + (high - low) // 2
        if WHAT == TIES:
            measured = _measure(source, begin, end, key, middle, WHAT, IN_LIST, CHANGED, BLOCK)
        else:
            measured = _measure(source, begin, end, middle, 0, WHAT, IN_LIST, CHANGED, BLOCK)
        high = tl.where(measured >= target, middle, high)
        low = tl.where(measured >= target, low, middle + 1)
    return high


@triton.jit
def _cutoff(source, search, IN_LIST: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr):
    """The last key that is kept, and the last token with it."""
    count, low, high, chunk_size, vocab_size, temperature, top_p, rank, total, before = search
    begin, end = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab_size
    size = tl.sum(count, axis=0)
    same_key = low == high
    cut_key = tl.full([], INFINITE_KEY, tl.int32)
    cut_token = tl.full([], LARGEST_INT, tl.int32)
    if rank > 0:
        high = _smallest(source, begin, end, low, high, 0, rank, KEYS, IN_LIST, CHANGED, BLOCK)
        cut_key = high
    if top_p < 1.0:
        if total < 0:
            if same_key:
                total = before + size * weight(low, temperature)
            else:
                total = before + _measure(
                    source, begin, end, high, 0, WEIGHTS, IN_LIST, CHANGED, BLOCK
                )
        needed = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        needed = tl.maximum(needed, 1) - before
        cut_key = _smallest(
            source, begin, end, low, high, 0, needed, WEIGHTS, IN_LIST, CHANGED, BLOCK
        )
        num_ties = size
        if same_key == 0:
            needed -= _measure(source, begin, end, cut_key - 1, 0, WEIGHTS, IN_LIST, CHANGED, BLOCK)
            num_ties = _measure(
                source, begin, end, cut_key, LARGEST_INT, TIES, IN_LIST, CHANGED, BLOCK
            )
        each = tl.maximum(weight(cut_key, temperature), 1)
        wanted = (needed + each - 1) // each
        if wanted < num_ties:
            if same_key & (IN_LIST == 0):  # the chunks' counts say which chunk to read
                reached = tl.cumsum(count, axis=0)
                is_before = reached < wanted
                wanted -= tl.sum(tl.where(is_before, count, 0), axis=0)
                begin = tl.sum(is_before.to(tl.int32), axis=0) * chunk_size
                end = tl.minimum(begin + chunk_size, vocab_size)
            cut_token = _smallest(
                source, begin, end, begin, end, cut_key, wanted, TIES, IN_LIST, CHANGED, BLOCK
            )
    return cut_key, cut_token


@triton.jit
def _listed(candidates, size, temperature, SIZE: tl.constexpr):
    """The list: keys, tokens and weights. What is past its end has the largest key and weight 0."""
    place = tl.arange(0, SIZE)
    inside = place < size
    candidate = tl.load(candidates + place, mask=inside, other=LARGEST_INT << 32)
    key, token = (candidate >> 32).to(tl.int32), candidate.to(tl.int32)
    return key, token, tl.where(inside, weight(key, temperature), 0)


@triton.jit(do_not_specialize=["chunk_size", "num_chunks"])
def find_cutoff_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    counts,
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
    SMALL: tl.constexpr,
    CHANGED: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: writes the last key that is kept, and the last token with it."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row)
    temperature, top_k, top_p, min_p, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    if is_filtered:
        cut_key = tl.full([], INFINITE_KEY, tl.int32)
        cut_token = tl.full([], LARGEST_INT, tl.int32)
        its_fields = fields + row * NUM_FIELDS
        highest = load_float(its_fields + HIGHEST)
        if (highest - highest) != 0.0:
            # As in the reference: a row with NaN, or with nothing but -inf, keeps no token, and
            # +inf comes after all others.
            num_infinite = tl.load(counts + row * BINS, mask=top_k > 0, other=0)
            keeps = (top_k > 0) & (top_k <= vocab_size - num_infinite) & (min_p <= 0.0)
            cut_key = tl.where((highest == float("inf")) & keeps, INFINITE_KEY, -1)
        elif (top_k > 0) | (top_p < 1.0):
            rank = tl.load(its_fields + RANK)
            size = tl.load(its_fields + LISTED)
            last_bin = tl.load(its_fields + LAST_BIN)
            chunk = tl.arange(0, CHUNKS_PAD)
            exists = chunk < num_chunks
            its_sums = sums + (row * num_chunks + chunk) * 2
            total = tl.sum(tl.load(its_sums, mask=exists, other=0), axis=0)
            before = tl.sum(tl.load(its_sums + 1, mask=exists, other=0), axis=0)
            # Top-p is of this total; -1 stands for that of what is before the list and in it.
            total = tl.where((rank == 0) & (last_bin < BINS - 1), total, -1)
            its_spans = spans + (row * num_chunks + chunk) * 3
            search = (
                tl.load(its_spans, mask=exists, other=0),
                tl.min(tl.load(its_spans + 1, mask=exists, other=LARGEST_INT), axis=0),
                tl.max(tl.load(its_spans + 2, mask=exists, other=-1), axis=0),
                chunk_size,
                vocab_size,
                temperature,
                top_p,
                rank,
                total,
                before,
            )
            candidates = listed + row * CAPACITY
            if size <= SMALL:
                source = _listed(candidates, size, temperature, SMALL)
                cut_key, cut_token = _cutoff(source, search, True, CHANGED, BLOCK)
            elif size <= CAPACITY:
                source = _listed(candidates, size, temperature, CAPACITY)
                cut_key, cut_token = _cutoff(source, search, True, CHANGED, BLOCK)
            else:
                source_row = (
                    logits + row * row_stride,
                    changed + row * vocab_size,
                    tl.load(is_changed + row) if CHANGED else 0,
                    vocab_size,
                    highest,
                    temperature,
                    load_float(its_fields + SCALE),
                    tl.load(its_fields + FIRST_BIN),
                    last_bin,
                )
                cut_key, cut_token = _cutoff(source_row, search, False, CHANGED, BLOCK)
        tl.store(its_fields + CUT_KEY, cut_key)
        tl.store(its_fields + CUT_TOKEN, cut_token)
