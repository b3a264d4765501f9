# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Kernels that apply masks, bias, min_tokens and penalties to a copy of the rows that use them.

1. ``copy_logits_kernel`` copies those rows, -inf where a mask does not allow a token, and clears
   the counts of the tokens in their histories.
2. ``count_tokens_kernel`` counts these tokens, adds the bias and suppresses stop tokens.
3. ``penalise_kernel`` changes the logit of each token in the history once: of all positions that
   have the token, one takes its count and leaves 0.

The counts of other tokens are never read or written, so they need no clearing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.dependent_launch import wait_for_previous

# Columns of the sampling state's tables.
PRESENCE, FREQUENCY, REPETITION = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
PROMPT_LEN, MIN_TOKENS, IS_MASKED = tl.constexpr(2), tl.constexpr(3), tl.constexpr(5)

IN_PROMPT = tl.constexpr(1 << 30)  # in a count: the token is in the prompt as well


@triton.jit
def _penalties(floats, req_index, float_stride):
    """Presence, frequency and repetition penalty, and whether any of them changes a logit."""
    presence = tl.load(floats + req_index * float_stride + PRESENCE)
    frequency = tl.load(floats + req_index * float_stride + FREQUENCY)
    repetition = tl.load(floats + req_index * float_stride + REPETITION)
    is_penalised = (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)
    return presence, frequency, repetition, is_penalised


@triton.jit
def _tokens(history, start, length, vocab_size, BLOCK: tl.constexpr):
    """A block of a history, and which of it counts."""
    place = start + tl.arange(0, BLOCK)
    token = tl.load(history + place, mask=place < length, other=-1)
    return place, token, (token >= 0) & (token < vocab_size)


@triton.jit
def _listed(ids, width, vocab_size, WIDTH_PAD: tl.constexpr):
    """The entries of a list of ids, and which of them are tokens."""
    place = tl.arange(0, WIDTH_PAD)
    token = tl.load(ids + place, mask=place < width, other=-1)
    return place, token, (token >= 0) & (token < vocab_size)


@triton.jit
def _add_bias(row, ids, values, width, vocab_size, WIDTH_PAD: tl.constexpr):
    """Add ``values`` to the logits ``ids``, all different; skip ids that are no token."""
    place, token, is_token = _listed(ids, width, vocab_size, WIDTH_PAD)
    value = tl.load(values + place, mask=is_token, other=0.0)
    score = tl.load(row + token, mask=is_token, other=0.0)
    tl.store(row + token, score + value, mask=is_token)


@triton.jit
def _hold_back(row, ids, width, vocab_size, WIDTH_PAD: tl.constexpr):
    """Set the logits ``ids`` to -inf; skip ids that are no token."""
    _, token, is_token = _listed(ids, width, vocab_size, WIDTH_PAD)
    never = tl.full([WIDTH_PAD], float("-inf"), dtype=tl.float32)
    tl.store(row + token, never, mask=is_token)


@triton.jit
def _is_short(length, ints):
    """Whether a request of ``length`` tokens must not stop yet."""
    num_generated = tl.maximum(length - tl.load(ints + PROMPT_LEN), 0)
    return num_generated < tl.load(ints + MIN_TOKENS)


@triton.jit(do_not_specialize=["blocks_per_chunk", "num_chunks"])
def copy_logits_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    lengths,
    floats,
    ints,
    bias_ids,
    token_ids,
    masks,
    token_counts,
    row_stride,
    float_stride,
    int_stride,
    bias_stride,
    history_stride,
    mask_stride,
    max_len,
    vocab_size,
    blocks_per_chunk,
    num_chunks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk of the vocabulary."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    length = tl.load(lengths + row).to(tl.int64)
    is_penalised = _penalties(floats, req_index, float_stride)[3]
    is_short = _is_short(length, ints + req_index * int_stride)
    has_bias = tl.load(bias_ids + req_index * bias_stride) >= 0
    needs_copy = is_penalised | is_short | has_bias
    is_masked = tl.full([], False, tl.int1)
    if MASKED:
        is_masked = tl.load(ints + req_index * int_stride + IS_MASKED) != 0
        needs_copy = needs_copy | is_masked
    if chunk == 0:
        tl.store(is_changed + row, needs_copy.to(tl.int32))
    if needs_copy:
        first = chunk * blocks_per_chunk
        for block in tl.range(first, first + blocks_per_chunk):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab_size
            score = tl.load(logits + row * row_stride + column, mask=inside).to(tl.float32)
            if MASKED:
                # A word has the bits of 32 adjacent columns, which a warp reads at once.
                its_words = masks + req_index * mask_stride + column // 32
                word = tl.load(its_words, mask=inside & is_masked, other=-1)
                score = tl.where((word >> (column % 32)) & 1 != 0, score, float("-inf"))
            tl.store(changed + row * vocab_size + column, score, mask=inside)
    if is_penalised:
        history = token_ids + req_index * history_stride
        end = tl.minimum(length, max_len).to(tl.int32)
        for start in tl.range(chunk * BLOCK, end, num_chunks * BLOCK):
            _, token, counts = _tokens(history, start, end, vocab_size, BLOCK)
            zero = tl.zeros([BLOCK], dtype=tl.int32)
            tl.store(token_counts + row * vocab_size + token, zero, mask=counts)


@triton.jit(do_not_specialize=["num_chunks"])
def count_tokens_kernel(
    changed,
    req_indices,
    lengths,
    floats,
    ints,
    bias_ids,
    bias_values,
    stop_ids,
    token_ids,
    token_counts,
    float_stride,
    int_stride,
    bias_stride,
    stop_stride,
    history_stride,
    num_bias,
    num_stops,
    max_len,
    vocab_size,
    num_chunks,
    BIAS_PAD: tl.constexpr,
    STOPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk of the history; the first also adds bias and min_tokens."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    length = tl.load(lengths + row).to(tl.int64)
    prompt_len = tl.load(ints + req_index * int_stride + PROMPT_LEN)
    if chunk == 0:
        scores = changed + row * vocab_size
        its_bias = req_index * bias_stride
        if tl.load(bias_ids + its_bias) >= 0:
            _add_bias(
                scores, bias_ids + its_bias, bias_values + its_bias, num_bias, vocab_size, BIAS_PAD
            )
        if _is_short(length, ints + req_index * int_stride):
            tl.debug_barrier()  # a stop token may have a bias
            its_stops = stop_ids + req_index * stop_stride
            _hold_back(scores, its_stops, num_stops, vocab_size, STOPS_PAD)
    if _penalties(floats, req_index, float_stride)[3]:
        history = token_ids + req_index * history_stride
        its_counts = token_counts + row * vocab_size
        end = tl.minimum(length, max_len).to(tl.int32)
        for start in tl.range(chunk * BLOCK, end, num_chunks * BLOCK):
            place, token, counts = _tokens(history, start, end, vocab_size, BLOCK)
            in_prompt = place < prompt_len
            tl.atomic_or(its_counts + token, IN_PROMPT, mask=counts & in_prompt, sem="relaxed")
            tl.atomic_add(its_counts + token, 1, mask=counts & (in_prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_chunks"])
def penalise_kernel(
    changed,
    req_indices,
    lengths,
    floats,
    token_ids,
    token_counts,
    float_stride,
    history_stride,
    max_len,
    vocab_size,
    num_chunks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk of the history."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row)
    presence, frequency, repetition, is_penalised = _penalties(floats, req_index, float_stride)
    if is_penalised:
        history = token_ids + req_index * history_stride
        end = tl.minimum(tl.load(lengths + row).to(tl.int64), max_len).to(tl.int32)
        for start in tl.range(tl.program_id(1) * BLOCK, end, num_chunks * BLOCK):
            _, token, counts = _tokens(history, start, end, vocab_size, BLOCK)
            count = tl.atomic_xchg(
                token_counts + row * vocab_size + token, 0, mask=counts, sem="relaxed"
            )
            is_first = counts & (count != 0)
            score = tl.load(changed + row * vocab_size + token, mask=is_first, other=0.0)
            divisor = tl.full([BLOCK], 0.0, tl.float32) + repetition
            score = tl.where(score > 0.0, tl.div_rn(score, divisor), score * repetition)
            number = (count & (IN_PROMPT - 1)).to(tl.float32)
            score = score - frequency * number
            score = score - presence * (number > 0.0).to(tl.float32)
            tl.store(changed + row * vocab_size + token, score, mask=is_first)
