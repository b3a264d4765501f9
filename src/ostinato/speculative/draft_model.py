"""Proposes what a smaller model samples next, one token at a time, inside the step's graph.

The draft model has keys and values of its own, in the same blocks as the model's, so prefixes that
are found in the cache are there for both. It samples with the request's own temperature and noise:
where both models are equally sure of a token, both sample it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.models.base import CausalLM
from ostinato.ops.decode_state import (
    DecodeInputs,
    DecodeState,
    load_decode_inputs,
    store_decode_outputs,
)
from ostinato.speculative.proposer import KVLayers, Proposer, ProposerContext
from ostinato.speculative.speculation import Speculation


@dataclass(frozen=True, kw_only=True)
class LoadedDraftModel(Speculation):
    """``DraftModel`` with its weights."""

    model: CausalLM

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        return self.model.attention_specs

    def build(self, context: ProposerContext) -> Proposer:
        return DraftModelProposer(self.model, context)


class DraftModelProposer(Proposer):
    """Runs ``model`` over the rows of a decode step: once per draft, and once more for the last.

    The last pass only stores keys and values: if all drafts are accepted, the next step begins
    behind them.
    """

    drafts_are_valid = reads_all_tokens = True

    def __init__(self, model: CausalLM, context: ProposerContext) -> None:
        if model.max_position < context.max_model_len:
            raise ConfigError(
                f"the draft model computes up to {model.max_position} positions, but max_model_len "
                f"is {context.max_model_len}; lower it, or choose another draft model"
            )
        if model.selects_tokens:
            raise ConfigError("a draft model cannot be a SwiftKV model; choose another")
        if model.recurrent_specs:
            raise ConfigError("a draft model cannot have recurrent layers; choose another")
        if model.uses_mrope:
            raise ConfigError("a draft model cannot be one that takes images; choose another")
        self._model = model
        self._context = context
        self._layers: KVLayers = context.new_kv_cache(model.attention_specs)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=context.device)

        rows = context.num_rows
        self._num_computed = zeros(rows, dtype=torch.int32)
        self._sampled = zeros(rows)
        self._ids, self._positions, self._slots = zeros(rows), zeros(rows), zeros(rows)
        self._seq_lens = zeros(rows, dtype=torch.int32)
        self._starts = zeros(rows + 1, dtype=torch.int32)
        self._block_table = zeros(rows, context.blocks_per_request, dtype=torch.int32)

    def propose(self, state: DecodeState) -> None:
        count, num_drafts = state.req_indices.shape[0], state.query_len - 1
        inputs = self._inputs(count)
        # Each pass counts its token here; in the state, only accepted tokens count.
        self._num_computed.copy_(state.num_computed)
        rows = state._replace(num_computed=self._num_computed, query_len=1)
        metadata = AttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            max_query_len=1,
            max_seq_len=self._context.max_model_len,
            kv_caches=self._layers,
            backend=self._context.backend,
            uniform_decode=True,
        )
        for index in range(num_drafts + 1):
            load_decode_inputs(rows, inputs)
            hidden = self._forward(inputs.input_ids, inputs.positions, metadata)
            if index < num_drafts:
                sampled = self._sample(hidden, rows, inputs)
                store_decode_outputs(rows, sampled)

    def read(
        self,
        state: DecodeState,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        its_own = replace(metadata, kv_caches=self._layers, logits_indices=None)
        self._forward(input_ids.clone(), positions, its_own)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        if self._model.vocab_size < self._context.vocab_size:
            input_ids.clamp_(max=self._model.vocab_size - 1)
        with set_forward_context(attn_metadata=metadata):
            return self._model.forward(input_ids, positions)

    def _sample(
        self, hidden: torch.Tensor, rows: DecodeState, inputs: DecodeInputs
    ) -> torch.Tensor:
        logits = self._model.compute_logits(hidden)[:, : self._context.vocab_size]
        sampled = self._sampled[: hidden.shape[0]]
        self._context.sampling.sample(logits, rows.req_indices, inputs.seq_lens, sampled)
        return sampled

    def _inputs(self, count: int) -> DecodeInputs:
        return DecodeInputs(
            self._ids[:count],
            self._positions[:count],
            self._seq_lens[:count],
            self._starts[: count + 1],
            self._block_table[:count],
            self._slots[:count],
        )

    def close(self) -> None:
        self._layers = ()
        if hasattr(self, "_model"):
            del self._model

    def tensors(self) -> Sequence[torch.Tensor]:
        own = (self._num_computed, self._sampled, self._ids, self._positions, self._slots)
        return (*own, self._seq_lens, self._starts, self._block_table, *sum(self._layers, ()))
