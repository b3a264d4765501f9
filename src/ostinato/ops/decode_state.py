"""The two ends of a decode step on the device: inputs from the request state, sampled tokens back.

``load_decode_inputs`` does for a batch with as many tokens in every request what
``InputBuffers.fill`` does for any batch, and needs only the request rows from the host.
``store_decode_outputs`` leaves the state ready for the next step, if that number is one. Each is
one operator that reads its integers when it runs, so a graph replays it with new contents: one
Triton kernel on CUDA, torch operators on the CPU.

An operator takes plain values, so the structs here are passed to it field by field, and packed
again for the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ostinato.ops.define import define
from ostinato.ops.triton.launch import launch, overlap


class DecodeState(NamedTuple):
    """The state of S request rows, and the rows that a decode batch of R runs.

    ``req_indices`` has the real rows first, then ``padding_req_index``. The next ``query_len`` (Q)
    tokens of every real row must be in ``token_ids``, and their blocks in the table.
    """

    req_indices: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [S] int32
    token_ids: torch.Tensor  # [S, L] int32
    block_table: torch.Tensor  # [S, blocks] int32
    padding_req_index: int
    block_size: int
    query_len: int = 1


class DecodeInputs(NamedTuple):
    """The inputs of a decode batch of R rows of Q tokens, including padding."""

    input_ids: torch.Tensor  # [R * Q] int64
    positions: torch.Tensor  # [R * Q] int64
    seq_lens: torch.Tensor  # [R] int32
    query_start_loc: torch.Tensor  # [R + 1] int32
    block_table: torch.Tensor  # [R, blocks] int32
    slot_mapping: torch.Tensor  # [R * Q] int64


_LOAD_SCHEMA = """load_decode_inputs(
    Tensor req_indices, Tensor num_computed, Tensor token_ids, Tensor state_block_table,
    int padding_req_index, int block_size, int query_len,
    Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) query_start_loc,
    Tensor(e!) block_table, Tensor(f!) slot_mapping
) -> ()"""
_STORE_SCHEMA = """store_decode_outputs(
    Tensor tokens, Tensor req_indices, Tensor(a!) num_computed, Tensor(b!) token_ids,
    Tensor state_block_table, int padding_req_index, int block_size, int query_len
) -> ()"""

_STORE_ROWS = 128  # per program


def load_decode_inputs(state: DecodeState, inputs: DecodeInputs) -> None:
    """Fill ``inputs`` from ``state``.

    Of ``inputs.block_table``, writes only the entries within the row's ``seq_lens``. Padding rows
    get id 0, position 0, slot -1 and length 0.
    """
    _load(*state, *inputs)


def store_decode_outputs(state: DecodeState, tokens: torch.Tensor) -> None:
    """Count the computed token and append the sampled one, for each real row; Q must be 1.

    ``tokens`` [R] int64. The padding row is neither read nor written.
    """
    _store(tokens, *state)


def load_decode_inputs_cpu(state: DecodeState, inputs: DecodeInputs) -> None:
    """The CPU kernel: real rows first, then padding."""
    req_indices, num_computed, token_ids, state_block_table, padding, block_size, length = state
    input_ids, positions, seq_lens, query_start_loc, block_table, slot_mapping = inputs
    num_rows = req_indices.shape[0]
    count = int((req_indices != padding).sum())
    rows = req_indices[:count]
    position = num_computed[rows].long()
    seq_lens[:count] = position + length
    last_block = (position + length - 1) // block_size
    for row, (req_index, last) in enumerate(zip(rows.tolist(), last_block.tolist(), strict=True)):
        block_table[row, : last + 1] = state_block_table[req_index, : last + 1]
    if length > 1:
        rows = rows.repeat_interleave(length)
        position = (position.unsqueeze(1) + torch.arange(length)).flatten()
    num_tokens = count * length
    input_ids[:num_tokens] = token_ids[rows, position]
    positions[:num_tokens] = position
    block = state_block_table[rows, position // block_size].long()
    slot_mapping[:num_tokens] = block * block_size + position % block_size
    seq_lens[count:num_rows] = 0
    for tensor, padded in ((input_ids, 0), (positions, 0), (slot_mapping, -1)):
        tensor[num_tokens : num_rows * length] = padded
    torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, out=query_start_loc)
    query_start_loc.clamp_(max=num_tokens)


def store_decode_outputs_cpu(state: DecodeState, tokens: torch.Tensor) -> None:
    """The CPU kernel."""
    is_real = state.req_indices != state.padding_req_index
    rows = state.req_indices[is_real]
    computed = state.num_computed[rows] + 1
    state.num_computed[rows] = computed
    state.token_ids[rows, computed.long()] = tokens[is_real].int()


def triton_load_decode_inputs(state: DecodeState, inputs: DecodeInputs) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.decode_state import load_inputs_kernel

    req_indices, num_computed, token_ids, block_table, padding, block_size, query_len = state
    num_rows = req_indices.shape[0]
    strides = (token_ids.stride(0), block_table.stride(0), inputs.block_table.stride(0))
    launch(
        load_inputs_kernel,
        (num_rows,),
        (req_indices, num_computed, token_ids, block_table, *inputs),
        (padding, num_rows, *strides),
        BLOCK_SIZE=block_size,
        QUERY_LEN=query_len,
        **overlap(req_indices.device),
        num_warps=1,
    )


def triton_store_decode_outputs(state: DecodeState, tokens: torch.Tensor) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.decode_state import store_outputs_kernel

    num_rows = state.req_indices.shape[0]
    launch(
        store_outputs_kernel,
        (-(-num_rows // _STORE_ROWS),),
        (state.req_indices, tokens, state.num_computed, state.token_ids),
        (state.padding_req_index, num_rows, state.token_ids.stride(0)),
        BLOCK=_STORE_ROWS,
        **overlap(state.req_indices.device),
        num_warps=4,
    )


def _pack_load(*args: Any) -> tuple[DecodeState, DecodeInputs]:
    return DecodeState(*args[:7]), DecodeInputs(*args[7:])


def _pack_store(tokens: torch.Tensor, *state: Any) -> tuple[DecodeState, torch.Tensor]:
    return DecodeState(*state), tokens


_load = define(
    _LOAD_SCHEMA, cpu=load_decode_inputs_cpu, cuda=triton_load_decode_inputs, pack=_pack_load
)
_store = define(
    _STORE_SCHEMA, cpu=store_decode_outputs_cpu, cuda=triton_store_decode_outputs, pack=_pack_store
)
