# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Three kernels: store keys and values, attend over the paged cache, combine split-KV parts.

They read every length on the device. What a launch depends on are shapes alone, so that one launch
in a CUDA graph serves any batch of its size. Which blocks to work in is the caller's choice.

OVERLAP: each kernel lets the next one begin before it is done, and the next waits for its results
where it needs them (programmatic dependent launch). The kernel that stores is launched without it,
so all that came before the three is done when they begin; in its place there may be one that does
wait (``rotary_store``), so queries are read after the wait. Lengths and tables are read before it:
between whoever writes them and the first layer there must be a kernel that is launched without
overlap, as the lookup of embeddings is.

Log and exp are to the base 2 throughout, as the hardware has them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
# Requests looked at in one go by a program that searches for its own.
SEARCH = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_reqs"])
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    out,
    slot_mapping,
    query_start_loc,
    num_reqs,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token: its key and value to its slot; zeros to ``out`` if it is padding."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    num_owned = tl.load(query_start_loc + num_reqs)
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    d = tl.arange(0, HEAD_PAD)[None, :]
    e = tl.arange(0, VALUE_PAD)[None, :]
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        there = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
        row = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=there)
        place = key_cache + block * key_block_stride + offset * key_slot_stride
        tl.store(place + head * key_cache_head_stride + d, row, mask=there)
        there = (head < NUM_KV_HEADS) & (e < VALUE_DIM)
        row = tl.load(value + token * value_token_stride + head * value_head_stride + e, mask=there)
        place = value_cache + block * value_block_stride + offset * value_slot_stride
        tl.store(place + head * value_cache_head_stride + e, row, mask=there)
    if token >= num_owned:
        query_head = tl.arange(0, HEADS_PAD)[:, None]
        there = (query_head < NUM_HEADS) & (e < VALUE_DIM)
        zeros = tl.zeros([HEADS_PAD, VALUE_PAD], dtype=out.dtype.element_ty)
        place = out + token * out_token_stride + query_head * out_head_stride + e
        tl.store(place, zeros, mask=there)


@triton.jit
def _find_request(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose tiles start at or before ``tile``.

    Counting reads all starts at once; a bisection would wait for memory at every turn.
    """
    count = 0
    for first in range(0, num_reqs, SEARCH):
        request = first + tl.arange(0, SEARCH)
        there = request < num_reqs
        start = tl.load(query_start_loc + request, mask=there, other=0)
        first_tile = (start + request * (BLOCK_Q - 1)) // BLOCK_Q
        count += tl.sum((there & (first_tile <= tile)).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def logits(scores, scale, soft_cap):
    """What the softmax to the base 2 is taken of."""
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities.
        doubled = tl.exp2(scores * (scale / soft_cap * 2.0 * LOG2_E))
        scores = (1.0 - 2.0 / (1.0 + doubled)) * (soft_cap * LOG2_E)
    else:
        scores = scores * (scale * LOG2_E)
    return scores


@triton.jit(do_not_specialize=["num_reqs", "max_keys", "num_splits"])
def attend_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial_values,
    partial_highest,
    partial_total,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    scale,
    window,
    soft_cap,
    num_reqs,
    max_keys,
    num_splits,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of at most BLOCK_Q queries of one request, KV head, and split of keys.

    The rows of its matrices are queries x the heads that share the KV head. Request r's tiles start
    at (query_start_loc[r] + r * (BLOCK_Q - 1)) // BLOCK_Q, which leaves each the tiles it needs.
    With SPLIT the softmax so far goes to ``partial_...`` [T, heads, splits], else to ``out``.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    request = _find_request(query_start_loc, tile, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_query = (tile - (start + request * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    # Keys beyond the table are promised only by batches that are made up for a capture.
    context = tl.minimum(tl.load(seq_lens + request), max_keys) - query_len
    m = tl.arange(0, BLOCK_M)
    row = first_query + m // GROUP
    owned = (m < BLOCK_Q * GROUP) & (row < query_len)
    position = context + row
    head = kv_head * GROUP + m % GROUP
    token = (start + row).to(tl.int64)
    d = tl.arange(0, HEAD_PAD)
    e = tl.arange(0, VALUE_PAD)
    if OVERLAP:
        gdc_wait()  # every program: what comes after waits for this kernel, not for the stores
    if first_query >= query_len:
        return
    q = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=owned[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
    if sinks is not None:  # as if they were a first key without value, of the first split
        sink = tl.load(sinks + head, mask=owned, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where((split == 0) & (position >= 0), sink, highest)
        total = tl.where((split == 0) & (position >= 0), 1.0, total)

    # What the tile's queries see between them, and this split's share in it.
    last = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    if window is not None:
        first = tl.maximum(tl.maximum(context + first_query, 0) - window + 1, 0)
    begin = first // BLOCK_N * BLOCK_N
    end = last + 1
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), num_splits) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)

    request_table = block_table + request.to(tl.int64) * table_stride
    for first_key in range(begin, end, BLOCK_N):
        key_position = first_key + tl.arange(0, BLOCK_N)
        # Other entries of the table, and other slots, may hold anything.
        seen = (key_position >= first) & (key_position <= last)
        block = tl.load(request_table + key_position // BLOCK_SIZE, mask=seen, other=0)
        block = block.to(tl.int64)
        offset = key_position % BLOCK_SIZE
        k_seen = seen[:, None]
        v_seen = seen[:, None]
        if HEAD_PAD != HEAD_DIM:
            k_seen = k_seen & (d < HEAD_DIM)[None, :]
        if VALUE_PAD != VALUE_DIM:
            v_seen = v_seen & (e < VALUE_DIM)[None, :]
        k_rows = block * key_block_stride + offset * key_slot_stride + kv_head * key_head_stride
        k = tl.load(key_cache + k_rows[:, None] + d[None, :], mask=k_seen, other=0.0)
        v_rows = (
            block * value_block_stride + offset * value_slot_stride + kv_head * value_head_stride
        )
        v = tl.load(value_cache + v_rows[:, None] + e[None, :], mask=v_seen, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = logits(scores, scale, soft_cap)
        distance = position[:, None] - key_position[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # An infinity less itself would be NaN; rows that saw nothing yet hold nothing to fade.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(weights, axis=1)
        values = values * faded[:, None]
        values = tl.dot(weights.to(v.dtype), v, values, input_precision="ieee")
        highest = new_highest

    there = owned[:, None] & (e < VALUE_DIM)[None, :]
    if SPLIT:
        place = (token * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(partial_highest + place, highest, mask=owned)
        tl.store(partial_total + place, total, mask=owned)
        there = there & (highest > float("-inf"))[:, None]
        tl.store(partial_values + (place * VALUE_DIM)[:, None] + e[None, :], values, mask=there)
    else:
        values = values / tl.where(total > 0.0, total, 1.0)[:, None]
        place = out + (token * out_token_stride + head * out_head_stride)[:, None] + e[None, :]
        tl.store(place, values.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_reqs"])
def combine_kernel(
    partial_values,
    partial_highest,
    partial_total,
    out,
    query_start_loc,
    num_reqs,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and head: the softmax over all splits, to ``out``."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_wait()
    if token >= tl.load(query_start_loc + num_reqs):
        return  # nothing was written for it
    split = (token * NUM_HEADS + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    e = tl.arange(0, VALUE_PAD)
    highest = tl.load(partial_highest + split)
    total = tl.load(partial_total + split)
    filled = highest > float("-inf")
    there = filled[:, None] & (e < VALUE_DIM)[None, :]
    values = tl.load(
        partial_values + (split * VALUE_DIM)[:, None] + e[None, :], mask=there, other=0.0
    )
    base = tl.max(highest, axis=0)
    weights = tl.where(filled, tl.exp2(highest - tl.where(base == float("-inf"), 0.0, base)), 0.0)
    total = tl.sum(total * weights, axis=0)
    values = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    place = out + token * out_token_stride + head * out_head_stride + e
    tl.store(place, values.to(out.dtype.element_ty), mask=e < VALUE_DIM)
