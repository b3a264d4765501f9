# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Two kernels at the ends of a decode step: inputs from the request state, sampled tokens back.

OVERLAP: each lets the next kernel start early, and itself waits until earlier ones are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.dependent_launch import wait_for_previous

# Rows to count, and block-table entries to copy, at a time.
WIDTH = tl.constexpr(256)


@triton.jit(do_not_specialize=["padding_req_index", "num_rows"])
def load_inputs_kernel(
    req_indices,
    num_computed,
    token_ids,
    state_block_table,
    input_ids,
    positions,
    seq_lens,
    query_start_loc,
    block_table,
    slot_mapping,
    padding_req_index,
    num_rows,
    token_ids_stride,
    state_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row of the padded batch."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    req_index = tl.load(req_indices + row)
    lane = tl.arange(0, WIDTH)
    if row == 0:
        tl.store(query_start_loc, 0)
    if req_index != padding_req_index:
        first_position = tl.load(num_computed + req_index)
        its_blocks = state_block_table + req_index * state_table_stride
        for index in tl.static_range(QUERY_LEN):
            position = first_position + index
            token = tl.load(token_ids + req_index * token_ids_stride + position)
            block = tl.load(its_blocks + position // BLOCK_SIZE).to(tl.int64)
            tl.store(input_ids + row * QUERY_LEN + index, token.to(tl.int64))
            tl.store(positions + row * QUERY_LEN + index, position.to(tl.int64))
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(slot_mapping + row * QUERY_LEN + index, slot)
        tl.store(seq_lens + row, first_position + QUERY_LEN)
        tl.store(query_start_loc + row + 1, (row + 1) * QUERY_LEN)  # real rows come first
        target = block_table + row.to(tl.int64) * table_stride
        used = (first_position + QUERY_LEN - 1) // BLOCK_SIZE + 1
        for first in range(0, used, WIDTH):
            entry = first + lane
            blocks = tl.load(its_blocks + entry, mask=entry < used)
            tl.store(target + entry, blocks, mask=entry < used)
    else:
        count = 0
        for first in range(0, num_rows, WIDTH):
            other = first + lane
            others = tl.load(req_indices + other, mask=other < num_rows, other=padding_req_index)
            count += tl.sum((others != padding_req_index).to(tl.int32), axis=0)
        for index in tl.static_range(QUERY_LEN):
            tl.store(input_ids + row * QUERY_LEN + index, 0)
            tl.store(positions + row * QUERY_LEN + index, 0)
            tl.store(slot_mapping + row * QUERY_LEN + index, -1)
        tl.store(seq_lens + row, 0)
        tl.store(query_start_loc + row + 1, count * QUERY_LEN)


@triton.jit(do_not_specialize=["padding_req_index", "num_rows"])
def store_outputs_kernel(
    req_indices,
    tokens,
    num_computed,
    token_ids,
    padding_req_index,
    num_rows,
    token_ids_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK rows of the padded batch."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    req_index = tl.load(req_indices + row, mask=row < num_rows, other=padding_req_index)
    real = req_index != padding_req_index
    computed = tl.load(num_computed + req_index, mask=real, other=0) + 1
    token = tl.load(tokens + row, mask=real, other=0)
    tl.store(num_computed + req_index, computed, mask=real)
    tl.store(token_ids + req_index * token_ids_stride + computed, token.to(tl.int32), mask=real)
