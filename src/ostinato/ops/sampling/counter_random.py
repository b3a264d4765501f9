"""Random numbers without a generator: a hash of (seed, position, vocabulary index).

A draw depends on nothing else, so a request's tokens do not change with the batch around it, its
row, padding, preemption or graph mode, and there is no state to save or capture. The hash uses
int64 operations that never overflow (its words stay below 2**32, its multipliers below 2**31), so
the words have the same bits on every device.

It is a statistical generator, sufficient for sampling. Do not use it for cryptography.
"""

from __future__ import annotations

import torch

WORD_MASK = 0xFFFFFFFF
# Words have 52 bits. The highest 32 are well mixed; the lower ones only add resolution.
WORD_BITS = 52
# Large batches are hashed a few columns at a time: int64 temporaries of all columns would take four
# times the memory of the logits.
PIECE_ELEMENTS = 1 << 24

_GOLDEN = 0x9E3779B1
_LAST_MULTIPLIER = 0x7FEB352D
_LARGEST_BELOW_ONE = 1 - 2**-24  # in float32


def spread_seed(seed: int) -> int:
    """An int64 key for a seed in [0, 2**64): one to one, and similar seeds get unrelated keys.

    Computed once per request on the host, which saves the device most of the mixing in every step.
    """
    key = (seed + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    return key - 2**64 if key >= 2**63 else key


def mix32(words: torch.Tensor) -> torch.Tensor:
    """A bijection of the integers below 2**32 in which every input bit affects every output bit."""
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & WORD_MASK
    # The same product modulo 2**32, with a multiplier small enough for int64.
    words = ((words ^ (words >> 15)) * (0xD35A2D97 - 2**32)) & WORD_MASK
    return words ^ (words >> 15)


def random_words(
    keys: torch.Tensor, positions: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Words of ``WORD_BITS`` bits, int64 [B, stop - start], for the indices from ``start`` on.

    ``keys`` [B] int64, from ``spread_seed``; ``positions`` [B] of any integer type.
    """
    places = positions.long() * _GOLDEN
    offset, second = mix32((torch.stack((keys, keys >> 32)) ^ places) & WORD_MASK).unsqueeze(2)
    multiplier = (second >> 1) | (1 << 30 | 1)  # odd, and large enough to fill the high bits
    columns = torch.arange(start, stop, device=keys.device).mul_(_GOLDEN).bitwise_and_(WORD_MASK)
    columns ^= columns >> 15  # multiples alone would line up with some rows' multipliers
    columns.mul_(0x21F0AAAD).bitwise_and_(WORD_MASK)
    # The cost per row and column: few operations, in place.
    words: torch.Tensor = columns ^ offset
    words *= multiplier
    words ^= words >> 32
    words &= WORD_MASK
    words *= _LAST_MULTIPLIER
    words &= (1 << WORD_BITS) - 1
    return words


def exponential_log(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logarithms of standard exponential draws, float32 [B, vocab_size], all finite.

    Their negatives are standard Gumbel draws: ``argmax(logits - exponential_log(...))`` is a sample
    from ``softmax(logits)``. The small draws, which win, have full precision.
    """
    num_rows = keys.shape[0]
    draws = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=keys.device)
    width = max(PIECE_ELEMENTS // max(num_rows, 1), 1)
    for start in range(0, vocab_size, width):
        stop = min(start + width, vocab_size)
        draws[:, start:stop].copy_(random_words(keys, positions, start, stop))
    # -log(1 - u) is exponential for u in (0, 1): a word as a fraction, never below 2**-33, since
    # words have 32 well-mixed bits. Kept negative throughout.
    draws.mul_(-(2.0**-WORD_BITS)).sub_(2.0**-33).clamp_(min=-_LARGEST_BELOW_ONE)
    return draws.log1p_().neg_().log_()
