# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Two kernels that sample a token per row: the best of each chunk of the vocabulary, then of all.

The noise matches ``counter_random`` operation for operation: the hash in integers, bit for bit; its
logarithms in float32 with the functions that torch calls.

A candidate is one int64, score above and token below, ordered like argmax: the highest score, the
first token among equal scores, and NaN above all. The maximum of such integers does not depend on
how they are grouped, so the split of the work does not affect the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from ostinato.ops.triton.dependent_launch import wait_for_previous

GOLDEN = tl.constexpr(0x9E3779B1)
LAST_MULTIPLIER = tl.constexpr(0x7FEB352D)
WORD_MASK = tl.constexpr(0xFFFFFFFF)
LARGEST_INT = tl.constexpr(0x7FFFFFFF)

if knobs.runtime.interpret:  # the interpreter cannot call CUDA's libdevice

    @triton.jit
    def log1p(x):
        """log(1 + x): the denominator cancels the rounding of 1 + x."""
        rounded = 1.0 + x
        exact = rounded == 1.0
        return tl.where(exact, x, tl.log(rounded) * (x / tl.where(exact, 1.0, rounded - 1.0)))

else:
    from triton.language.extra.cuda.libdevice import log1p  # type: ignore[no-redef]


@triton.jit
def _mix32(words):
    """``counter_random.mix32``, for an int64 below 2**32."""
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & WORD_MASK
    words = ((words ^ (words >> 15)) * (0xD35A2D97 - 0x100000000)) & WORD_MASK
    return words ^ (words >> 15)


@triton.jit
def row_of_noise(key, position):
    """The ``offset`` and ``multiplier`` of ``exponential_log`` for a seed's key and a position."""
    place = position.to(tl.int64) * GOLDEN
    offset = _mix32((key ^ place) & WORD_MASK).to(tl.uint32)
    multiplier = (_mix32(((key >> 32) ^ place) & WORD_MASK) >> 1) | 0x40000001
    return offset, multiplier.to(tl.uint64)


@triton.jit
def exponential_log(column, offset, multiplier):
    """``counter_random.exponential_log`` of the row given by ``offset`` and ``multiplier``.

    ``column`` int32; ``offset`` uint32 and ``multiplier`` uint64, both scalars.
    """
    words = column.to(tl.uint32) * tl.full([], GOLDEN, tl.uint32)
    words = (words ^ (words >> 15)) * tl.full([], 0x21F0AAAD, tl.uint32)
    product = (words ^ offset).to(tl.uint64) * multiplier
    words = (product ^ (product >> 32)).to(tl.uint32)
    product = words.to(tl.uint64) * tl.full([], LAST_MULTIPLIER, tl.uint64)
    word = (product & 0xFFFFFFFFFFFFF).to(tl.int64).to(tl.float32)
    # The constants: 2**-52, 2**-33, and the largest float32 below 1.
    u = word * -2.220446049250313e-16 - 1.1641532182693481e-10
    return tl.log(-log1p(tl.maximum(u, -0.999999940395355224609375)))


@triton.jit
def ordered(score, token):
    """Candidates: scores and their tokens as integers."""
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0, but has other bits
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(score == score, bits ^ ((bits >> 31) & LARGEST_INT), LARGEST_INT)
    return (order.to(tl.int64) << 32) | (token ^ LARGEST_INT).to(tl.int64)


@triton.jit
def _best(
    row,
    first_block,
    num_blocks,
    vocab_size,
    temperature,
    offset,
    multiplier,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best candidate of some blocks of a row of logits."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    token = first_block * BLOCK + lane
    # Without noise, two blocks at a time are in flight.
    UNROLL: tl.constexpr = 1 if RANDOM else 2
    for block in tl.range(first_block, first_block + num_blocks, loop_unroll_factor=UNROLL):
        column = block * BLOCK + lane
        score = tl.load(row + column, mask=column < vocab_size, other=float("-inf"))
        score = score.to(tl.float32)
        if RANDOM:
            score = score - exponential_log(column, offset, multiplier) * temperature
        better = (score > best) | ((score != score) & (best == best))
        best = tl.where(better, score, best)
        token = tl.where(better, column, token)
    return tl.max(ordered(best, token), axis=0)


@triton.jit(do_not_specialize=["blocks_per_chunk", "num_chunks"])
def best_of_chunk_kernel(
    logits,
    req_indices,
    temperature,
    seed_key,
    lengths,
    candidates,
    row_stride,
    temperature_stride,
    seed_key_stride,
    vocab_size,
    blocks_per_chunk,
    num_chunks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk of the vocabulary: writes its best to [B, chunks]."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    row_temperature = tl.load(temperature + req_index * temperature_stride)
    its_logits = logits + row * row_stride
    first_block = chunk * blocks_per_chunk
    if row_temperature > 0.0:
        key = tl.load(seed_key + req_index * seed_key_stride)
        offset, multiplier = row_of_noise(key, tl.load(lengths + row))
        candidate = _best(
            its_logits,
            first_block * 2,
            blocks_per_chunk * 2,
            vocab_size,
            row_temperature,
            offset,
            multiplier,
            RANDOM=True,
            BLOCK=BLOCK // 2,  # the hash needs registers, and memory is no longer the bottleneck
        )
    else:  # at temperature 0 no noise is needed
        candidate = _best(
            its_logits,
            first_block,
            blocks_per_chunk,
            vocab_size,
            None,
            None,
            None,
            RANDOM=False,
            BLOCK=BLOCK,
        )
    tl.store(candidates + row * num_chunks + chunk, candidate)


@triton.jit(do_not_specialize=["num_chunks"])
def best_of_all_kernel(
    candidates,
    out_tokens,
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: the token of its best candidate."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.minimum(tl.arange(0, CHUNKS_PAD), num_chunks - 1)  # repeats the last one
    best = tl.max(tl.load(candidates + row * num_chunks + chunk), axis=0)
    tl.store(out_tokens + row, (best & LARGEST_INT) ^ LARGEST_INT)
