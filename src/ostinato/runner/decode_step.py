"""A decode step that never leaves the device: inputs from the state, forward, sample, state.

With drafts, a step computes Q tokens of each request: its last one and Q - 1 drafts
(``draft_sampling``).

Everything it reads and writes has a fixed address, so a FULL graph captures the whole step, and the
host replays step n + 1 before it has read the tokens of step n. When other requests join or leave,
the only cost is one small copy: the rows of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ostinato.models.base import CausalLM
from ostinato.ops.decode_state import DecodeInputs, load_decode_inputs, store_decode_outputs
from ostinato.runner.sampling.draft_sampling import (
    decode_rows,
    observe_step,
    propose_drafts,
    sample_drafts,
)
from ostinato.runner.step_memory import StepMemory


@dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """``token_ids`` [R * Q] int64, sampled by temperature alone; ``logits`` [R * Q, V]."""

    token_ids: torch.Tensor
    logits: torch.Tensor


def decode_step(
    model: CausalLM,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    memory: StepMemory,
    num_reqs: int,
    query_len: int = 1,
) -> DecodeOutput:
    """Compute ``query_len`` tokens of each of the first ``num_reqs`` rows, padding included.

    ``forward`` is the model's forward, or its piecewise form. Attention reads the batch from the
    forward context, whose tensors are views of ``buffers``.
    """
    state, buffers = memory.state, memory.buffers
    tokens, num_tokens = buffers.tokens, num_reqs * query_len
    rows = decode_rows(state, buffers, num_reqs, query_len)
    inputs = DecodeInputs(
        buffers.input_ids[:num_tokens],
        buffers.token_numbers[:num_tokens],
        tokens.seq_lens[:num_reqs],
        tokens.query_start_loc[: num_reqs + 1],
        tokens.block_tables[0][:num_reqs],
        tokens.slot_mappings[0, :num_tokens],
    )
    if query_len > 1 or memory.drafts_read_all:
        propose_drafts(memory, rows, model.vocab_size)
    load_decode_inputs(rows, inputs)
    buffers.keep_own_part(num_reqs=num_reqs, num_tokens=num_tokens)
    if buffers.position_offsets is not None:
        owners = rows.req_indices
        if query_len > 1:
            owners = owners.unsqueeze(1).expand(num_reqs, query_len).flatten()
        buffers.set_positions(state, owners, num_tokens)
    hidden = forward(inputs.input_ids, tokens.positions[..., :num_tokens])
    observe_step(memory, rows)
    logits = model.compute_logits(hidden)
    if query_len > 1:
        sampled = sample_drafts(memory, rows, logits)
        return DecodeOutput(token_ids=sampled, logits=logits)
    sampled = buffers.sampled[:num_reqs]
    # With n tokens in the cache, the next one is at position n.
    state.sampling.sample(logits, rows.req_indices, inputs.seq_lens, sampled)
    store_decode_outputs(rows, sampled)
    return DecodeOutput(token_ids=sampled, logits=logits)
