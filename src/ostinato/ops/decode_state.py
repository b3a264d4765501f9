"""The ends of a decode step that stays on the device: inputs from the request state, tokens back.

``load_decode_inputs`` does for a batch of one token per request what ``InputBuffers.fill`` does for
any batch, and needs only the request rows from the host. ``store_decode_outputs`` leaves the state
ready for the next step. To torch each is one operator that reads its integers when it runs, so a
graph replays it with new contents: on CUDA one Triton kernel each, on the CPU torch operators.
"""

from __future__ import annotations

import torch

from ostinato.ops.define import define
from ostinato.ops.triton.launch import launch, overlap

_LOAD_SCHEMA = """load_decode_inputs(
    Tensor req_indices, Tensor num_computed, Tensor token_ids, Tensor state_block_table,
    int padding_slot, int block_size,
    Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) query_start_loc,
    Tensor(e!) block_table, Tensor(f!) slot_mapping
) -> ()"""
_STORE_SCHEMA = """store_decode_outputs(
    Tensor req_indices, Tensor tokens, Tensor(a!) num_computed, Tensor(b!) token_ids,
    int padding_slot
) -> ()"""

_STORE_ROWS = 128  # per program


def load_decode_inputs(
    req_indices: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    state_block_table: torch.Tensor,
    padding_slot: int,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Fill a decode batch of R rows, including padding, from the state of S request rows.

    Reads ``req_indices`` [R] int64, real ones first, then ``padding_slot``; and from the state
    ``num_computed`` [S], ``token_ids`` [S, L] and ``state_block_table`` [S, blocks], all int32.
    Every real row's next token must be in ``token_ids``, and its block in the table.

    Writes ``input_ids``, ``positions`` and ``slot_mapping`` [R] int64, ``seq_lens`` [R] int32,
    ``query_start_loc`` [R + 1] int32; and of ``block_table`` [R, blocks] int32 only the entries
    within the row's ``seq_lens``. Padding rows get id 0, position 0, slot -1 and length 0.
    """
    _load(
        req_indices,
        num_computed,
        token_ids,
        state_block_table,
        padding_slot,
        block_size,
        input_ids,
        positions,
        seq_lens,
        query_start_loc,
        block_table,
        slot_mapping,
    )


def store_decode_outputs(
    req_indices: torch.Tensor,
    tokens: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    padding_slot: int,
) -> None:
    """Count the computed token and append the sampled one, for each real row.

    ``req_indices`` and ``tokens`` [R] int64; the state as in ``load_decode_inputs``. The padding
    row is neither read nor written.
    """
    _store(req_indices, tokens, num_computed, token_ids, padding_slot)


def load_decode_inputs_cpu(
    req_indices: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    state_block_table: torch.Tensor,
    padding_slot: int,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The CPU kernel: real rows first, then padding."""
    num_rows = req_indices.shape[0]
    count = int((req_indices != padding_slot).sum())
    rows = req_indices[:count]
    position = num_computed[rows].long()
    input_ids[:count] = token_ids[rows, position].long()
    positions[:count] = position
    seq_lens[:count] = (position + 1).int()
    block_index = position // block_size
    block = state_block_table[rows, block_index].long()
    slot_mapping[:count] = block * block_size + position % block_size
    for row, (req_index, last) in enumerate(zip(rows.tolist(), block_index.tolist(), strict=True)):
        block_table[row, : last + 1] = state_block_table[req_index, : last + 1]
    for tensor, padding in ((input_ids, 0), (positions, 0), (seq_lens, 0), (slot_mapping, -1)):
        tensor[count:num_rows] = padding
    torch.arange(num_rows + 1, dtype=torch.int32, out=query_start_loc)
    query_start_loc.clamp_(max=count)


def store_decode_outputs_cpu(
    req_indices: torch.Tensor,
    tokens: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    padding_slot: int,
) -> None:
    """The CPU kernel."""
    is_real = req_indices != padding_slot
    rows = req_indices[is_real]
    computed = num_computed[rows] + 1
    num_computed[rows] = computed
    token_ids[rows, computed.long()] = tokens[is_real].int()


def triton_load_decode_inputs(
    req_indices: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    state_block_table: torch.Tensor,
    padding_slot: int,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.decode_state import load_inputs_kernel

    num_rows = req_indices.shape[0]
    launch(
        load_inputs_kernel,
        (num_rows,),
        (
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
        ),
        (
            padding_slot,
            num_rows,
            token_ids.stride(0),
            state_block_table.stride(0),
            block_table.stride(0),
        ),
        BLOCK_SIZE=block_size,
        **overlap(req_indices.device),
        num_warps=1,
    )


def triton_store_decode_outputs(
    req_indices: torch.Tensor,
    tokens: torch.Tensor,
    num_computed: torch.Tensor,
    token_ids: torch.Tensor,
    padding_slot: int,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.decode_state import store_outputs_kernel

    num_rows = req_indices.shape[0]
    launch(
        store_outputs_kernel,
        (-(-num_rows // _STORE_ROWS),),
        (req_indices, tokens, num_computed, token_ids),
        (padding_slot, num_rows, token_ids.stride(0)),
        BLOCK=_STORE_ROWS,
        **overlap(req_indices.device),
        num_warps=4,
    )


_load = define(_LOAD_SCHEMA, cpu=load_decode_inputs_cpu, cuda=triton_load_decode_inputs)
_store = define(_STORE_SCHEMA, cpu=store_decode_outputs_cpu, cuda=triton_store_decode_outputs)
