"""A decode step that never leaves the device: inputs from the state, forward, sample, state.

Everything it reads and writes has a fixed address, so a FULL graph captures the whole step, and the
host replays step n + 1 before it has read the tokens of step n. When other requests join or leave,
the only cost is one small copy: the rows of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ostinato.models.base import CausalLM
from ostinato.ops.decode_state import (
    DecodeInputs,
    DecodeState,
    load_decode_inputs,
    store_decode_outputs,
)
from ostinato.ops.sampling import sample_rows
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.request_state import RequestState


@dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """``token_ids`` [R] int64, sampled by temperature alone, and their ``logits`` [R, V]."""

    token_ids: torch.Tensor
    logits: torch.Tensor


def decode_step(
    model: CausalLM,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    state: RequestState,
    buffers: InputBuffers,
    num_reqs: int,
) -> DecodeOutput:
    """Compute one token for each of the first ``num_reqs`` rows of ``buffers``, padding included.

    ``forward`` is the model's forward, or its piecewise form. Attention reads the batch from the
    forward context, whose tensors are views of ``buffers``.
    """
    tokens = buffers.tokens
    rows = DecodeState(
        buffers.req_indices[:num_reqs],
        state.num_computed,
        state.token_ids,
        state.block_table,
        state.padding_req_index,
        buffers.block_size,
    )
    inputs = DecodeInputs(
        buffers.input_ids[:num_reqs],
        tokens.positions[:num_reqs],
        tokens.seq_lens[:num_reqs],
        tokens.query_start_loc[: num_reqs + 1],
        tokens.block_tables[0][:num_reqs],
        tokens.slot_mappings[0, :num_reqs],
    )
    load_decode_inputs(rows, inputs)
    logits = model.compute_logits(forward(inputs.input_ids, inputs.positions))
    sampled, parameters = buffers.sampled[:num_reqs], state.sampling
    # With n tokens in the cache, the next one is at position n.
    sample_rows(
        logits,
        rows.req_indices,
        parameters.temperature,
        parameters.seed_key,
        inputs.seq_lens,
        sampled,
    )
    store_decode_outputs(rows, sampled)
    return DecodeOutput(token_ids=sampled, logits=logits)
