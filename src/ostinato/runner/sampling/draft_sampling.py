"""The sampling of decode steps with drafts: a token after each, and which of them count.

What is sampled after the last token and after each draft is the request's output, up to the first
token that was drafted differently. The noise of a random sample depends on its position alone, so
these are the tokens that steps without drafts would sample, whatever was drafted.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.ops.decode_state import DecodeState
from ostinato.ops.sampling.drafts import accept_drafts
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.request_state import RequestState
from ostinato.runner.sampling.filtered_rows import FilteredRows
from ostinato.runner.step_memory import StepMemory
from ostinato.scheduling.step_plan import DecodePlan, StepPlan


def decode_rows(
    state: RequestState, buffers: InputBuffers, num_reqs: int, query_len: int
) -> DecodeState:
    """The first ``num_reqs`` rows of ``buffers``, with ``query_len`` tokens each."""
    return DecodeState(
        buffers.req_indices[:num_reqs],
        state.num_computed,
        state.token_ids,
        state.block_table,
        state.padding_req_index,
        buffers.block_size,
        query_len,
    )


def propose_drafts(memory: StepMemory, rows: DecodeState, vocab_size: int) -> None:
    """Write drafts into the state, behind the last token of each row.

    What is not a token id is replaced by one, unless the proposer promises that all are.
    """
    assert memory.proposer is not None, "a step with drafts has been scheduled"
    memory.proposer.propose(rows)
    if rows.query_len == 1 or memory.proposer.drafts_are_valid:
        return
    offsets = torch.arange(1, rows.query_len, device=memory.device)
    positions = rows.num_computed[rows.req_indices].long().unsqueeze(1) + offsets
    req_indices = rows.req_indices.unsqueeze(1)
    drafts = rows.token_ids[req_indices, positions].clamp(0, vocab_size - 1)
    rows.token_ids[req_indices, positions] = drafts


def admit_requests(memory: StepMemory, plan: StepPlan) -> None:
    """Tell what proposes drafts which requests are new in this step."""
    if memory.proposer is not None and not isinstance(plan, DecodePlan):
        for item in plan.requests:
            if item.is_new:
                memory.proposer.admit(item.req_index, item.request)


def read_step(memory: StepMemory, metadata: AttentionMetadata) -> None:
    """Show a step with prompts, once it is sampled, to what proposes drafts, if it must know."""
    if memory.proposer is not None and memory.drafts_read_all:
        buffers, num_tokens = memory.buffers, metadata.slot_mapping.shape[0]
        rows = decode_rows(memory.state, buffers, metadata.seq_lens.shape[0], 1)
        ids, positions = buffers.input_ids[:num_tokens], buffers.token_numbers[:num_tokens]
        memory.proposer.read(rows, ids, positions, metadata)


def observe_step(memory: StepMemory, rows: DecodeState) -> None:
    """Tell what proposes drafts which tokens the model has computed, if it must know."""
    if memory.proposer is not None and memory.drafts_read_all:
        num_tokens = rows.req_indices.shape[0] * rows.query_len
        memory.proposer.observe(rows, memory.buffers.token_numbers[:num_tokens])


def sample_drafts(memory: StepMemory, rows: DecodeState, logits: torch.Tensor) -> torch.Tensor:
    """Sample after each token of the rows in the buffers, and accept drafts.

    ``logits`` [R * Q, V]. Returns the sampled tokens [R * Q]; those that count go to the state.
    """
    drafts = memory.buffers.drafts(rows)
    drafts.req_indices.view(-1, rows.query_len).copy_(rows.req_indices.unsqueeze(1))
    drafts.lengths.copy_(drafts.positions).add_(1)
    memory.state.sampling.sample(logits, drafts.req_indices, drafts.lengths, drafts.sampled)
    accept_drafts(rows, drafts.sampled, drafts.input_ids, drafts.positions, drafts.accepted)
    return drafts.sampled


def restore_drafts(memory: StepMemory, rows: DecodeState) -> None:
    """Undo what ``accept_drafts`` wrote over drafts: penalties look at the tokens before a row."""
    drafts = memory.buffers.drafts(rows)
    rows.token_ids[drafts.req_indices, drafts.positions] = drafts.input_ids.int()


def accept_again(memory: StepMemory, rows: DecodeState) -> None:
    """Accept drafts after some of the tokens in the buffers were sampled again."""
    drafts = memory.buffers.drafts(rows)
    accept_drafts(rows, drafts.sampled, drafts.input_ids, drafts.positions, drafts.accepted)


def sample_again(
    memory: StepMemory, rows: DecodeState, logits: torch.Tensor, filtered: FilteredRows
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Sample the filtered rows again and accept drafts again.

    Returns the accepted tokens, flat, and the logprobs of the filtered rows, if wanted.
    """
    drafts = memory.buffers.drafts(rows)
    restore_drafts(memory, rows)
    token_ids, logprobs = filtered.sample(
        memory.state, drafts.sampled, logits, drafts.req_indices, drafts.lengths
    )
    drafts.sampled.copy_(token_ids)
    accept_again(memory, rows)
    return drafts.accepted.flatten(), logprobs
