"""When latent attention computes keys and values of every head: arithmetic only.

Operations for each head, with rank r and heads of n columns without RoPE, p with it, v of values:

| | absorbed | expanded |
|---|---|---|
| a query and a key | 2 (2 r + p) | 2 (n + p + v) |
| a key | - | 2 r (n + v) |

For DeepSeek-V2 and V3 (r 512, n 128, p 64, v 128) that is 2,176 or 640 for each pair, and 262,144
for each key: a request with a long prefix in the cache pays for its expansion from 171 queries on,
one without from 342 on, and below that the difference is small. Operations decide, not bytes: a
key of 16 heads takes 10,240 bytes, written in 2.3 ns at 4.39 TB/s, and projected in 5.3 ns at 790
TFLOP/s. A decode step reads 1,152 bytes a key absorbed, and would read 640 for each head.

A request's own queries decide, so a batch with prompts expands these, and absorbs the rest. On CUDA
the choice is made on the device, and graphs of all modes hold both ways.
"""

from __future__ import annotations

from functools import lru_cache

# Of the keys and values that a layer expands at a time, unless a step has more new tokens.
_MOST_BYTES = 256 << 20


@lru_cache(maxsize=64)
def least_queries(rank: int, query_dim: int, value_dim: int, rope_dim: int) -> int | None:
    """The number of queries of one request from which on expansion pays off; None: never."""
    saved = (2 * rank + rope_dim) - (query_dim + value_dim)
    if saved <= 0:
        return None
    return max(2, -(-rank * (query_dim - rope_dim + value_dim) // saved))


def expanded_rows(num_tokens: int, max_keys: int, row_bytes: int) -> int:
    """Keys that a batch of ``num_tokens`` tokens has room to expand, of requests of ``max_keys``.

    At least those of prompts without a prefix; requests that do not fit are absorbed.
    ``row_bytes``: of a key and a value, of all heads.
    """
    return max(num_tokens, min(max_keys, _MOST_BYTES // row_bytes))
