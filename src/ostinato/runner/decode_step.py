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
from ostinato.ops.decode_state import load_decode_inputs, store_decode_outputs
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
    req_indices, seq_lens = buffers.req_indices[:num_reqs], tokens.seq_lens[:num_reqs]
    input_ids, positions = buffers.input_ids[:num_reqs], tokens.positions[:num_reqs]
    load_decode_inputs(
        req_indices,
        state.num_computed,
        state.token_ids,
        state.block_table,
        state.padding_slot,
        buffers.block_size,
        input_ids,
        positions,
        seq_lens,
        tokens.query_start_loc[: num_reqs + 1],
        tokens.block_tables[0][:num_reqs],
        tokens.slot_mappings[0, :num_reqs],
    )
    logits = model.compute_logits(forward(input_ids, positions))
    sampled = buffers.sampled[:num_reqs]
    # With n tokens in the cache, the next one is at position n.
    sample_rows(
        logits, req_indices, state.sampling.temperature, state.sampling.seed_key, seq_lens, sampled
    )
    store_decode_outputs(
        req_indices, sampled, state.num_computed, state.token_ids, state.padding_slot
    )
    return DecodeOutput(token_ids=sampled, logits=logits)
