# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Kernels that find where top-k and top-p cut off each row, without sorting it.

A token's key is the bits of how far its logit is behind the row's highest: such floats are not
negative, so they order like their bits. A row's cutoff is a key, and the last token kept among
those that have it. Four kernels find it:

1. ``logit_range_kernel``: the highest logit, and ``BINS`` equal steps from it to the lowest.
2. ``histogram_kernel``: a histogram of the tokens over these bins, and roughly their total weight.
   From these, which bins the cutoff can be in.
3. ``collect_candidates_kernel``: lists the tokens of these bins, and adds up the exact weights of
   the row and of the tokens before them.
4. ``find_cutoff_kernel``: bisects the list, in registers.

Exact weights are integers, so no result depends on how the work is split. A token more than
``REACH`` temperatures behind has weight 0, and noise never makes it win: such tokens are ignored.

Kernels 1 to 3 have one program per row and chunk. Their time is that of instructions and barriers,
not of memory, so what is the same for all chunks of a row is left to the row's last program.

Greedy rows and rows without these filters cost a launch each, and nothing more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from ostinato.ops.triton.dependent_launch import wait_for_previous

# Columns of the sampling state's tables; ``SamplingState`` fills them.
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOP_K = tl.constexpr(0)

BINS = tl.constexpr(256)
REACH = tl.constexpr(28.0)  # exp(-28) * 2**40 is below 1, and draws span less than 26
FULL_WEIGHT = tl.constexpr(2.0**40)
INFINITE_KEY = tl.constexpr(0x7F800000)
LARGEST_INT = tl.constexpr(0x7FFFFFFF)
LARGEST_FLOAT = tl.constexpr(3.4e38)
MASKED_OUT = tl.constexpr(-60000.0)  # logits below it would stretch the bins; they get the last

# Columns of a row's integers between the kernels.
HIGHEST, SCALE, WIDTH, ARRIVED, FIRST_BIN, LAST_BIN = map(tl.constexpr, range(6))
RANK, LISTED, CUT_KEY, CUT_TOKEN, NUM_FIELDS = map(tl.constexpr, range(6, 11))

if knobs.runtime.interpret:  # the interpreter cannot call CUDA's libdevice

    @triton.jit
    def exp(x):
        return tl.exp(x)

else:
    from triton.language.extra.cuda.libdevice import exp  # type: ignore[no-redef]


@triton.jit
def load_scores(row, changed_row, is_changed, column, vocab_size, CHANGED: tl.constexpr):
    """Logits as float32, from the changed copy of the row if it has one; -inf past the end."""
    inside = column < vocab_size
    in_logits = inside & (is_changed == 0)
    score = tl.load(row + column, mask=in_logits, other=float("-inf")).to(tl.float32)
    if CHANGED:
        in_copy = inside & (is_changed != 0)
        copied = tl.load(changed_row + column, mask=in_copy, other=float("-inf"))
        score = tl.where(is_changed != 0, copied, score)
    return score


@triton.jit
def filters(floats, ints, req_index, float_stride, int_stride, vocab_size):
    """A row's temperature, top-k (0: off), top-p and min-p, and whether it is filtered."""
    temperature = tl.load(floats + req_index * float_stride + TEMPERATURE)
    top_p = tl.load(floats + req_index * float_stride + TOP_P)
    min_p = tl.load(floats + req_index * float_stride + MIN_P)
    top_k = tl.load(ints + req_index * int_stride + TOP_K)
    is_filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    top_k = tl.where(top_k < vocab_size, top_k, 0).to(tl.int32)
    return temperature, top_k, top_p, min_p, is_filtered


@triton.jit
def load_float(place):
    """A float32 among integers."""
    return tl.load(place).to(tl.float32, bitcast=True)


@triton.jit
def store_float(place, value):
    tl.store(place, value.to(tl.int32, bitcast=True))


@triton.jit
def key_of(score, highest):
    """How far behind a score is, as ordered bits. NaN is above infinity, -0.0 is 0.0."""
    return (highest - score).to(tl.int32, bitcast=True) & LARGEST_INT


@triton.jit
def likelihood(key, temperature):
    """Relative to the most likely token, rounded as torch does it."""
    behind = key.to(tl.float32, bitcast=True)
    return exp(-tl.div_rn(behind, tl.full(behind.shape, 0.0, tl.float32) + temperature))


@triton.jit
def weight(key, temperature):
    share = likelihood(key, temperature) * FULL_WEIGHT
    return tl.where(share == share, share, 0.0).to(tl.int64)


@triton.jit
def _row_range(ranges, row, num_chunks, CHUNKS_PAD: tl.constexpr):
    """The row's highest logit (NaN if it has one), and the lowest of most chunks.

    The latter is where the bins end. An eighth of the chunks may have lower ones: a few outliers
    would make the bins so wide that one has all other tokens.
    """
    chunk = tl.arange(0, CHUNKS_PAD)
    exists = chunk < num_chunks
    place = ranges + (row * num_chunks + chunk) * 2
    highest = tl.load(place, mask=exists, other=float("-inf"), cache_modifier=".cg")
    has_nan = tl.max((highest != highest).to(tl.int32), axis=0) != 0
    lows = tl.load(place + 1, mask=exists, other=float("inf"), cache_modifier=".cg")
    num_ignored = tl.sum((lows < float("inf")).to(tl.int32), axis=0) // 8
    lowest = tl.min(lows, axis=0)
    while tl.sum((lows <= lowest).to(tl.int32), axis=0) <= num_ignored:
        lowest = tl.min(tl.where(lows > lowest, lows, float("inf")), axis=0)
    return tl.where(has_nan, float("nan"), tl.max(highest, axis=0)), lowest


@triton.jit
def _bins_per_logit(highest, lowest, temperature):
    """The scale of the bins, and their width in temperatures. Monotonic in the logits."""
    span = tl.minimum(temperature * REACH, highest - lowest)
    is_wide = span > 1e-30
    scale = tl.where(is_wide, BINS / tl.where(is_wide, span, 1.0), 0.0)
    return scale, tl.where(is_wide, span / temperature, BINS * REACH) / BINS


@triton.jit
def bin_of(score, highest, reach, scale):
    """Each score's bin, as a float to be rounded down, and whether it is in one: in reach.

    ``reach`` is finite, so that scores past the end of the row, -inf, are in none.
    """
    behind = highest - score
    is_highest = score == highest  # infinity minus itself is NaN
    step = tl.where(is_highest, 0.0, tl.minimum(behind * scale, BINS - 1.0))
    return step, (behind <= reach) | is_highest


@triton.jit
def reach_of(temperature):
    """How far behind a token can be and still win."""
    return tl.minimum(REACH * temperature, LARGEST_FLOAT)


@triton.jit(do_not_specialize=["chunk_size", "num_chunks"])
def logit_range_kernel(
    logits,
    changed,
    is_changed,
    req_indices,
    floats,
    ints,
    counts,
    fields,
    ranges,
    arrivals,
    row_stride,
    float_stride,
    int_stride,
    vocab_size,
    chunk_size,
    num_chunks,
    CHANGED: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk; the last one of a row writes its highest logit and its bins.

    Also clears what the next kernels add to. ``arrivals`` [B] counts the programs, from 0.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    temperature, _, _, _, is_filtered = filters(
        floats, ints, req_index, float_stride, int_stride, vocab_size
    )
    if is_filtered:
        row_is_changed = tl.load(is_changed + row) if CHANGED else 0
        lane = tl.arange(0, BLOCK)
        highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        has_nan = tl.full([BLOCK], 0, dtype=tl.int32)
        num_blocks = chunk_size // BLOCK
        for block in tl.range(chunk * num_blocks, (chunk + 1) * num_blocks):
            score = load_scores(
                logits + row * row_stride,
                changed + row * vocab_size,
                row_is_changed,
                block * BLOCK + lane,
                vocab_size,
                CHANGED,
            )
            highest = tl.where(score > highest, score, highest)
            lowest = tl.where((score > MASKED_OUT) & (score < lowest), score, lowest)
            has_nan = has_nan | (score != score).to(tl.int32)
        top = tl.where(tl.max(has_nan, axis=0) != 0, float("nan"), tl.max(highest, axis=0))
        place = ranges + (row * num_chunks + chunk) * 2
        tl.store(place, top)
        tl.store(place + 1, tl.min(lowest, axis=0))
        if chunk == 0:
            every_bin = tl.arange(0, BINS)
            tl.store(counts + row * BINS + every_bin, tl.zeros([BINS], dtype=tl.int32))
            tl.store(fields + row * NUM_FIELDS + ARRIVED, 0)
            tl.store(fields + row * NUM_FIELDS + LISTED, 0)
        tl.debug_barrier()  # all threads have written before one counts the program
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            highest_of_row, lowest_of_row = _row_range(ranges, row, num_chunks, CHUNKS_PAD)
            scale, width = _bins_per_logit(highest_of_row, lowest_of_row, temperature)
            store_float(fields + row * NUM_FIELDS + HIGHEST, highest_of_row)
            store_float(fields + row * NUM_FIELDS + SCALE, scale)
            store_float(fields + row * NUM_FIELDS + WIDTH, width)
