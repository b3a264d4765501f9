# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Kernels of speculative decoding: find the last tokens again, write drafts, accept drafts.

A candidate is one int64: the length of a match above, then whether it is in the request's own
tokens, then the place where it ends. The largest is the best.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.dependent_launch import wait_for_previous

IS_OWN = tl.constexpr(0x80000000)
PLACE_MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _best_match(
    text, num_ends, first, tokens, last, max_match, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The best candidate among CHUNK places of ``text`` from ``first`` on, without IS_OWN."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], 0, dtype=tl.int64)
    for start in range(first, tl.minimum(first + CHUNK, num_ends), BLOCK):
        end = start + lane
        matches = end < num_ends
        length = tl.zeros([BLOCK], dtype=tl.int32)
        offset = 0
        going = 1
        while (offset < max_match) & (offset <= last) & (going > 0):
            token = tl.load(tokens + last - offset)
            matches = matches & (end >= offset)
            its_token = tl.load(text + end - offset, mask=matches, other=-1)
            matches = matches & (its_token == token)
            length += matches.to(tl.int32)
            going = tl.max(matches.to(tl.int32), axis=0)
            offset += 1
        best = tl.maximum(best, (length.to(tl.int64) << 32) | end.to(tl.int64))
    return tl.max(best, axis=0)


@triton.jit(do_not_specialize=["padding_req_index", "history_len", "num_chunks", "num_own"])
def find_match_kernel(
    req_indices,
    num_computed,
    token_ids,
    history,
    candidates,
    padding_req_index,
    token_ids_stride,
    history_len,
    num_chunks,
    num_own,
    max_match,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and chunk of its own tokens, then of the history."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    req_index = tl.load(req_indices + row)
    candidate = tl.full([], 0, dtype=tl.int64)
    if req_index != padding_req_index:
        last = tl.load(num_computed + req_index)
        tokens = token_ids + req_index * token_ids_stride
        if chunk < num_own:
            candidate = _best_match(
                tokens, last, chunk * CHUNK, tokens, last, max_match, CHUNK, BLOCK
            )
            candidate = candidate | IS_OWN
        else:
            first = (chunk - num_own) * CHUNK
            candidate = _best_match(
                history, history_len - 1, first, tokens, last, max_match, CHUNK, BLOCK
            )
    tl.store(candidates + row * num_chunks + chunk, candidate)


@triton.jit(do_not_specialize=["padding_req_index", "history_len", "num_chunks", "min_match"])
def write_drafts_kernel(
    req_indices,
    num_computed,
    token_ids,
    history,
    candidates,
    padding_req_index,
    token_ids_stride,
    history_len,
    num_chunks,
    min_match,
    num_drafts,
    CHUNKS_PAD: tl.constexpr,
    DRAFTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row: the drafts of its best candidate."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    req_index = tl.load(req_indices + row)
    if req_index != padding_req_index:
        chunk = tl.minimum(tl.arange(0, CHUNKS_PAD), num_chunks - 1)  # repeats the last one
        best = tl.max(tl.load(candidates + row * num_chunks + chunk), axis=0)
        last = tl.load(num_computed + req_index)
        tokens = token_ids + req_index * token_ids_stride
        place = (best & PLACE_MASK).to(tl.int32)
        found = (best >> 32) >= min_match
        is_own = ((best & IS_OWN) != 0) | (found == 0)
        place = tl.where(found, place, last - 1)
        index = tl.arange(0, DRAFTS_PAD)
        wanted = index < num_drafts
        own = tokens + place + 1 + index % tl.maximum(last - place, 1)
        past = place + 1 + index
        draft = tl.load(own, mask=wanted & is_own, other=0)
        in_history = wanted & (is_own == 0) & (past < history_len)
        draft = tl.maximum(draft, tl.load(history + past, mask=in_history, other=0))
        tl.store(tokens + last + 1 + index, draft, mask=wanted)


@triton.jit(do_not_specialize=["padding_req_index"])
def accept_drafts_kernel(
    req_indices,
    sampled,
    input_ids,
    positions,
    num_computed,
    token_ids,
    accepted,
    padding_req_index,
    token_ids_stride,
    QUERY_LEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row of the padded batch."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    req_index = tl.load(req_indices + row)
    is_real = req_index != padding_req_index
    first = tl.load(positions + row * QUERY_LEN) + 1
    target = token_ids + req_index * token_ids_stride + first
    count = tl.full([], 0, dtype=tl.int64)
    going = tl.full([], 1, dtype=tl.int1)
    for index in tl.static_range(QUERY_LEN):
        token = tl.load(sampled + row * QUERY_LEN + index)
        tl.store(accepted + row * (QUERY_LEN + 1) + index, token)
        tl.store(target + index, token.to(tl.int32), mask=is_real & going)
        count += going.to(tl.int64)
        if index + 1 < QUERY_LEN:
            going = going & (tl.load(input_ids + row * QUERY_LEN + index + 1) == token)
    tl.store(accepted + row * (QUERY_LEN + 1) + QUERY_LEN, count)
    tl.store(num_computed + req_index, (first + count - 1).to(tl.int32), mask=is_real)
