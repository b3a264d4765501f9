"""The static inputs of a step, filled from the state of the requests.

The host copies only which requests run, their numbers of tokens and which of them sample, in one
small copy. The device computes everything per token from the request state, with shapes that depend
on the padded size alone, so FULL graphs contain that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata
from ostinato.attention.selected import last_tokens
from ostinato.graphs.capture.capture_inputs import TokenBuffers
from ostinato.ops.decode_state import DecodeState
from ostinato.recurrent.base import RecurrentBatch, RecurrentStates
from ostinato.runner.kv_cache import CacheSize, KVCache
from ostinato.runner.request_state import RequestState

PADDING_SLOT_MAPPING = -1
NOT_SELECTED = -1


class Drafts(NamedTuple):
    """A decode batch of R rows with Q tokens each, the last one and drafts.

    ``lengths`` [R * Q] int32: tokens of the request up to each. ``sampled`` [R * Q]: what follows
    each. ``accepted`` [R, Q + 1]: the same and how many of them count, as ``accept_drafts`` writes
    it. All but ``lengths`` are int64.
    """

    req_indices: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    sampled: torch.Tensor
    accepted: torch.Tensor


class InputBuffers:
    """The inputs of every batch, at fixed addresses. Padding has no slot, length 0, valid ids.

    ``max_query_len``: most tokens of a request in a decode batch.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        cache: CacheSize,
        device: torch.device,
        max_query_len: int = 1,
        mrope: bool = False,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_size = cache.block_size
        self._part, self._block_slots = cache.part, cache.block_slots
        # By request: its row and its tokens; by request that samples: its last token and its row.
        # Each begins at a multiple of 16 bytes, for which kernels are compiled.
        self._from_host = zeros(4, max_num_seqs + max_num_seqs % 2)
        self.req_indices, self.query_lens, self._last_tokens, self._sampling = (
            each[:max_num_seqs] for each in self._from_host
        )
        most_sampled = max_num_seqs * max_query_len
        self.sampled = zeros(most_sampled)
        # By token, of decode batches with drafts.
        with_drafts = most_sampled if max_query_len > 1 else 0
        self.draft_req_indices = zeros(with_drafts)
        self.draft_lengths = zeros(with_drafts, dtype=torch.int32)
        self.accepted = zeros(with_drafts + max_num_seqs if with_drafts else 0)
        self.logits_indices = zeros(max_num_seqs)
        self._padding_req_index = max_num_seqs  # the state's last row
        self.tokens = TokenBuffers(
            query_start_loc=zeros(max_num_seqs + 1, dtype=torch.int32),
            seq_lens=zeros(max_num_seqs, dtype=torch.int32),
            block_tables=[zeros(max_num_seqs, cache.blocks_per_request, dtype=torch.int32)],
            slot_mappings=zeros(1, max_num_tokens),
            positions=zeros(3, max_num_tokens) if mrope else zeros(max_num_tokens),
            input_ids=zeros(max_num_tokens),
            dcp_local_seq_lens=zeros(max_num_seqs, dtype=torch.int32) if cache.part else None,
        )
        # With M-RoPE: each token's number in its sequence, and what else is added to its positions
        # (0 unless the step has images).
        self.token_numbers = zeros(max_num_tokens) if mrope else self.tokens.positions
        self.position_offsets = zeros(3, max_num_tokens) if mrope else None
        self.token_range = torch.arange(max_num_tokens, device=device, dtype=torch.int32)
        self.reset()

    @property
    def input_ids(self) -> torch.Tensor:
        assert self.tokens.input_ids is not None
        return self.tokens.input_ids

    def drafts(self, rows: DecodeState) -> Drafts:
        """The buffers of a decode batch with drafts."""
        num_reqs, query_len = rows.req_indices.shape[0], rows.query_len
        count = num_reqs * query_len
        return Drafts(
            req_indices=self.draft_req_indices[:count],
            input_ids=self.input_ids[:count],
            positions=self.token_numbers[:count],
            lengths=self.draft_lengths[:count],
            sampled=self.sampled[:count],
            accepted=self.accepted[: count + num_reqs].view(num_reqs, query_len + 1),
        )

    def reset(self) -> None:
        """Fill all rows with padding for a capture, which must not write to the KV cache."""
        tokens = self.tokens
        self.req_indices.fill_(self._padding_req_index)
        for buffer in (
            self.query_lens,
            self.sampled,
            tokens.query_start_loc,
            tokens.seq_lens,
            *tokens.block_tables,
            tokens.positions,
            self.token_numbers,
            self.input_ids,
        ):
            buffer.zero_()
        if tokens.dcp_local_seq_lens is not None:
            tokens.dcp_local_seq_lens.zero_()
        tokens.slot_mappings.fill_(PADDING_SLOT_MAPPING)
        self.logits_indices.fill_(NOT_SELECTED)

    def fill(
        self,
        state: RequestState,
        req_indices: Sequence[int],
        query_lens: Sequence[int],
        *,
        num_reqs: int,
        num_tokens: int,
    ) -> None:
        """Fill ``num_reqs`` rows and ``num_tokens`` tokens (both padded) from the state."""
        self.set_queries(req_indices, query_lens)
        self.load(state, num_reqs=num_reqs, num_tokens=num_tokens)

    def set_queries(
        self,
        req_indices: Sequence[int],
        query_lens: Sequence[int],
        samples: Sequence[bool] = (),
    ) -> None:
        """Set the requests and their numbers of tokens; all further rows become padding.

        ``samples``: whether each request samples, for ``sampling_rows``.
        """
        values = np.zeros(self._from_host.shape, dtype=np.int64)
        values[0] = self._padding_req_index
        values[0, : len(req_indices)] = req_indices
        values[1, : len(query_lens)] = query_lens
        sampling = np.flatnonzero(samples)
        values[2, : len(sampling)] = values[1].cumsum()[sampling] - 1
        values[3, : len(sampling)] = values[0, sampling]
        # Staged like ``_copy_from_host``.
        self._from_host.copy_(torch.from_numpy(values), non_blocking=True)

    def sampling_rows(self, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last tokens of the requests that sample, and the rows of these, as set last."""
        return self._last_tokens[:num_samples], self._sampling[:num_samples]

    def load(self, state: RequestState, *, num_reqs: int, num_tokens: int) -> None:
        """Compute all inputs for the requests set last, on the device."""
        tokens = self.tokens
        rows, lens = self.req_indices[:num_reqs], self.query_lens[:num_reqs]
        starts = tokens.query_start_loc[: num_reqs + 1]
        torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        computed = state.num_computed[rows]
        # Padding rows have query length 0, and the state's padding row has computed nothing.
        torch.add(computed, lens, out=tokens.seq_lens[:num_reqs])
        table = tokens.block_tables[0][:num_reqs]
        torch.index_select(state.block_table, 0, rows, out=table)

        index = self.token_range[:num_tokens]
        owner = torch.searchsorted(starts[1:], index, right=True)
        is_padding = owner == num_reqs
        owner = owner.clamp_(max=num_reqs - 1)
        offset = (index - starts[owner]).masked_fill_(is_padding, 0)
        position = (computed[owner] + offset).to(torch.int64)
        self.token_numbers[:num_tokens].copy_(position)
        if self.position_offsets is not None:
            self.set_positions(state, rows[owner], num_tokens)
            positions = tokens.positions[:, :num_tokens]
            positions += self.position_offsets[:, :num_tokens]
            positions.clamp_(min=0)  # padding has the delta of a request, and no offsets
        self.input_ids[:num_tokens].copy_(state.token_ids[rows[owner], position])
        block = table[owner, position // self.block_size].to(torch.int64)
        slot = block * self.block_size + position % self.block_size
        tokens.slot_mappings[0, :num_tokens].copy_(
            slot.masked_fill_(is_padding, PADDING_SLOT_MAPPING)
        )
        self.keep_own_part(num_reqs=num_reqs, num_tokens=num_tokens)

    def keep_own_part(self, *, num_reqs: int, num_tokens: int) -> None:
        """If ranks share out the KV cache, keep only the slots of this rank's tokens."""
        if self._part is None:
            return
        tokens = self.tokens
        slots, local = tokens.slot_mappings[0, :num_tokens], tokens.dcp_local_seq_lens
        assert local is not None, "allocated for a part"
        slots.copy_(self._part.local_slots(slots, self._block_slots))
        local[:num_reqs].copy_(self._part.local_seq_lens(tokens.seq_lens[:num_reqs]))

    def set_positions(self, state: RequestState, rows: torch.Tensor, num_tokens: int) -> None:
        """Set the three positions of tokens of ``rows``, by their numbers, for M-RoPE."""
        assert state.rope_delta is not None
        position = self.token_numbers[:num_tokens] + state.rope_delta[rows]
        self.tokens.positions[:, :num_tokens].copy_(position)

    def set_rows(self, req_indices: Sequence[int], num_reqs: int) -> None:
        """Set the rows of a decode batch: ``req_indices``, then padding up to ``num_reqs`` rows."""
        padding = num_reqs - len(req_indices)
        _copy_from_host(
            self.req_indices[:num_reqs], [*req_indices, *[self._padding_req_index] * padding]
        )

    def select_last_tokens(self, num_reqs: int) -> None:
        """Select the last token of each filled row: only its hidden state will be read."""
        starts = self.tokens.query_start_loc[: num_reqs + 1]
        last_tokens(starts, self.logits_indices[:num_reqs])

    def select_all_tokens(self, num_reqs: int) -> None:
        """Select the token of each row when rows have one token; they need not be filled yet."""
        self.logits_indices[:num_reqs].copy_(self.token_range[:num_reqs])

    def metadata(
        self,
        *,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        kv_cache: KVCache,
        backend: AttentionBackend,
        selected: bool = False,
        uniform_decode: bool = False,
        states: RecurrentStates | None = None,
        query_lens: Sequence[int] | None = None,
    ) -> AttentionMetadata:
        """The filled batch as attention sees it: views of these buffers.

        ``selected``: the hidden states of at most one token per row will be read, which the caller
        selects before or after this call. Otherwise the states of all tokens will be.
        ``states``: of recurrent layers, if the model has any; ``query_lens`` is for these.
        """
        tokens = self.tokens
        local = tokens.dcp_local_seq_lens
        recurrent = None
        if states is not None:
            recurrent = RecurrentBatch(
                states=states.layers,
                req_indices=self.req_indices[:num_reqs],
                query_start_loc=tokens.query_start_loc[: num_reqs + 1],
                seq_lens=tokens.seq_lens[:num_reqs],
                uniform_decode=uniform_decode,
                query_lens=query_lens,
            )
        return AttentionMetadata(
            query_start_loc=tokens.query_start_loc[: num_reqs + 1],
            seq_lens=tokens.seq_lens[:num_reqs],
            block_table=tokens.block_tables[0][:num_reqs],
            slot_mapping=tokens.slot_mappings[0, :num_tokens],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            kv_caches=kv_cache.layers,
            backend=backend,
            logits_indices=self.logits_indices[:num_reqs] if selected else None,
            uniform_decode=uniform_decode,
            dcp_local_seq_lens=None if local is None else local[:num_reqs],
            recurrent=recurrent,
        )


def _copy_from_host(target: torch.Tensor, values: list[int]) -> None:
    # From pageable memory: the source is staged before copy_ returns, so the host does not wait for
    # the GPU, and the source can be reused at once.
    target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)
