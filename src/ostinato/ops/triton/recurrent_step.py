# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""A token of each request through a linear recurrence: each state is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def recurrent_step_kernel(
    query,
    key,
    value,
    log_decay,
    beta,
    states,
    req_indices,
    is_fresh,
    out,
    query_stride,
    key_stride,
    value_stride,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per request, head and BLOCK_V columns of the state, which are independent."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    unit = row * tl.num_programs(1) + head
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    group = head // SHARED
    queries = tl.load(query + row * query_stride + group * KEYS + k, mask=k < KEYS, other=0.0)
    keys = tl.load(key + row * key_stride + group * KEYS + k, mask=k < KEYS, other=0.0)
    change = tl.load(value + row * value_stride + head * VALUES + v, mask=v < VALUES, other=0.0)
    place = tl.load(req_indices + row) * tl.num_programs(1) + head
    address = states + place * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :]
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    known = inside & (tl.load(is_fresh + row) == 0)
    state = tl.load(address, mask=known, other=0.0) * tl.exp(tl.load(log_decay + unit))
    if beta is not None:
        change = (change - tl.sum(keys[:, None] * state, axis=0)) * tl.load(beta + unit)
    state += keys[:, None] * change[None, :]
    tl.store(address, state, mask=inside)
    result = tl.sum(queries[:, None] * state, axis=0)
    tl.store(out + unit * VALUES + v, result.to(out.dtype.element_ty), mask=v < VALUES)
