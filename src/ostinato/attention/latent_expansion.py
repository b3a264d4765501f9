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
the choice is made on the device, and graphs of all modes hold both ways. There, operations are not
all (``gpu_rule``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# Of the keys and values that a layer expands at a time, unless a step has more new tokens.
_MOST_BYTES = 256 << 20


@lru_cache(maxsize=64)
def least_queries(rank: int, query_dim: int, value_dim: int, rope_dim: int) -> int | None:
    """The number of queries of one request from which on expansion pays off; None: never."""
    saved = (2 * rank + rope_dim) - (query_dim + value_dim)
    if saved <= 0:
        return None
    return max(2, -(-rank * (query_dim - rope_dim + value_dim) // saved))


class ExpansionRule(NamedTuple):
    """Requests with ``least_queries`` are expanded, in steps of ``least_tokens`` and more."""

    least_queries: int
    least_tokens: int


@lru_cache(maxsize=64)
def gpu_rule(rank: int, query_dim: int, value_dim: int, rope_dim: int) -> ExpansionRule | None:
    """What ``least_queries`` becomes on a GPU; None: never.

    Measured on an H200 with the heads of DeepSeek-V2-Lite, in ms per layer: a step that expands
    takes 0.27, whatever it expands, and 0.04 for 1,024 keys; a million pairs of query and key take
    0.15 absorbed and 0.015 expanded. So fresh prompts gain from 580 tokens on and chunks behind a
    long prefix from 290 on, and only if all that a step saves is more than it costs: a step of one
    prompt of 2,048 tokens took 38 ms expanded and 35 ms absorbed, one of 8,192 103 and 215 ms.
    """
    least = least_queries(rank, query_dim, value_dim, rope_dim)
    return None if least is None else ExpansionRule(3 * least, 2304)


def expanded_rows(num_tokens: int, max_keys: int, row_bytes: int) -> int:
    """Keys that a batch of ``num_tokens`` tokens has room to expand, of requests of ``max_keys``.

    At least those of prompts without a prefix; requests that do not fit are absorbed.
    ``row_bytes``: of a key and a value, of all heads.
    """
    return max(num_tokens, min(max_keys, _MOST_BYTES // row_bytes))
