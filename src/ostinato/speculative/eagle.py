"""Proposes what an EAGLE head predicts from the model's own hidden states.

The head computes a position once the model has: it needs the model's states there and the token
that follows. So a step keeps the states of the tokens it computes (``observe``), and the next one
begins with those that were accepted, whose number only the device knows, then drafts one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.graphs.capture.context import set_forward_context
from ostinato.ops.decode_state import DecodeState
from ostinato.speculative.eagle_head import EagleHead
from ostinato.speculative.proposer import KVLayers, Proposer, ProposerContext
from ostinato.speculative.speculation import Speculation

_UNKNOWN = -(2**30)  # a position from which no step's tokens reach any other


@dataclass(frozen=True, kw_only=True)
class LoadedEagle(Speculation):
    """``EagleDrafts`` with its weights."""

    head: EagleHead
    layers: tuple[int, ...]

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        return [self.head.spec]

    @property
    def aux_hidden_state_layers(self) -> Sequence[int]:
        return self.layers

    def build(self, context: ProposerContext) -> Proposer:
        return EagleProposer(self.head, context)


class EagleProposer(Proposer):
    """Runs ``head``, which has a KV cache of its own in the blocks of the requests."""

    drafts_are_valid = reads_all_tokens = True

    def __init__(self, head: EagleHead, context: ProposerContext) -> None:
        self._head = head
        self._context = context
        self._layers: KVLayers = context.new_kv_cache([head.spec])
        self._most = 1 + context.max_num_drafts
        dtype = context.aux_hidden_states[0].dtype
        # Of the tokens that each request computed in its last step, from this position on.
        shape = (context.num_rows, self._most, head.hidden_size)
        self._fused = torch.zeros(shape, dtype=dtype, device=context.device)
        self._first = torch.full(
            (context.num_rows,), _UNKNOWN, dtype=torch.int64, device=context.device
        )

    def admit(self, req_index: int, request: object) -> None:
        self._first[req_index].fill_(_UNKNOWN)

    # --- what the model has computed -----------------------------------------------------------

    def observe(self, state: DecodeState, positions: torch.Tensor) -> None:
        count, length = state.req_indices.shape[0], state.query_len
        fused = self._fuse(count * length).view(count, length, -1)
        self._fused[:, :length].index_copy_(0, state.req_indices, fused)
        self._first.index_copy_(0, state.req_indices, positions.view(count, length)[:, 0])

    def read(
        self,
        state: DecodeState,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        num_tokens, starts = positions.shape[0], metadata.query_start_loc
        owner, _ = _owners(starts, num_tokens)
        rows, fused = state.req_indices, self._fuse(num_tokens)
        next_ids = state.token_ids[rows[owner], positions + 1].long()
        own = replace(metadata, kv_caches=self._layers, logits_indices=None, uniform_decode=False)
        self._forward(next_ids, fused, positions, own)
        last = (starts[1:].long() - 1).clamp(min=0)
        self._fused[:, 0].index_copy_(0, rows, fused[last])
        self._first.index_copy_(0, rows, positions[last])

    def _fuse(self, num_tokens: int) -> torch.Tensor:
        return self._head.fuse([each[:num_tokens] for each in self._context.aux_hidden_states])

    # --- drafts --------------------------------------------------------------------------------

    def propose(self, state: DecodeState) -> None:
        rows = state.req_indices
        is_real = rows != state.padding_req_index
        last = state.num_computed[rows].long() * is_real
        hidden = self._catch_up(state, last, is_real)
        token = hidden.new_zeros(0, dtype=torch.int64)
        for index in range(state.query_len - 1):
            if index:
                hidden = self._draft(state, token, hidden, last + index - 1, is_real)
            token = self._sample(state, hidden, last + index + 1)
            state.token_ids[rows, last + index + 1] = token.int()

    def _catch_up(
        self, state: DecodeState, last: torch.Tensor, is_real: torch.Tensor
    ) -> torch.Tensor:
        """Compute the tokens accepted in the last step; return the state of each row's last."""
        rows, count = state.req_indices, state.req_indices.shape[0]
        num_new = last - self._first[rows]
        num_new = num_new * (is_real & (num_new > 0) & (num_new <= self._most))
        starts = _starts(num_new)
        num_tokens = count * self._most
        owner, is_padding = _owners(starts, num_tokens)
        offset = torch.arange(num_tokens, device=rows.device) - starts[owner]
        offset = offset.masked_fill(is_padding, 0)
        its_row = rows[owner]
        position = (self._first[its_row] + offset).masked_fill(is_padding, 0)
        next_ids = state.token_ids[its_row, position + 1].long()
        metadata = self._metadata(
            state,
            query_start_loc=starts.int(),
            seq_lens=(last * (num_new > 0)).int(),
            slots=self._slots(state, its_row, position, ~is_padding),
            max_query_len=self._most,
        )
        hidden = self._forward(next_ids, self._fused[its_row, offset], position, metadata)
        return hidden[(starts[1:] - 1).clamp(min=0)]

    def _draft(
        self,
        state: DecodeState,
        token: torch.Tensor,
        hidden: torch.Tensor,
        position: torch.Tensor,
        is_real: torch.Tensor,
    ) -> torch.Tensor:
        metadata = self._metadata(
            state,
            query_start_loc=_starts(is_real.long()).int(),
            seq_lens=((position + 1) * is_real).int(),
            slots=self._slots(state, state.req_indices, position, is_real),
            max_query_len=1,
        )
        return self._forward(token, hidden, position, metadata)

    def _forward(
        self,
        next_ids: torch.Tensor,
        fused: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        with set_forward_context(attn_metadata=metadata):
            return self._head.forward(next_ids, fused, positions)

    def _sample(
        self, state: DecodeState, hidden: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        logits, token = self._head.compute_logits(hidden), torch.zeros_like(lengths)
        self._context.sampling.sample(logits, state.req_indices, lengths.int(), token)
        return token

    def _slots(
        self, state: DecodeState, rows: torch.Tensor, position: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        size = state.block_size
        block = state.block_table[rows, position // size].long()
        return (block * size + position % size).masked_fill(~real, -1)

    def _metadata(
        self,
        state: DecodeState,
        *,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        max_query_len: int,
    ) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=state.block_table[state.req_indices],
            slot_mapping=slots,
            max_query_len=max_query_len,
            max_seq_len=self._context.max_model_len,
            kv_caches=self._layers,
            backend=self._context.backend,
            uniform_decode=max_query_len == 1,
        )

    def close(self) -> None:
        self._layers = ()
        if hasattr(self, "_head"):
            del self._head

    def tensors(self) -> Sequence[torch.Tensor]:
        aux = self._context.aux_hidden_states
        return (self._fused, self._first, *aux, *sum(self._layers, ()))


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row's tokens start [R + 1]."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _owners(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each of ``num_tokens`` tokens, and which belong to none."""
    index = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    owner = torch.searchsorted(starts[1:].contiguous(), index, right=True)
    num_rows = starts.shape[0] - 1
    return owner.clamp(max=num_rows - 1), owner >= num_rows
