"""Samples what no graph samples: batches with prompts, and decode steps without a whole graph.

Every row is sampled by its temperature first, then those that want more again (``FilteredRows``).
Between the two, the host writes the masks of constrained requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ostinato.models.base import CausalLM
from ostinato.ops.decode_state import DecodeState
from ostinato.runner.ambient import without_autocast
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.sampling.filtered_rows import FilteredRows
from ostinato.runner.sampling.sampler_graphs import SamplerLaunch, SamplerStats
from ostinato.runner.sampling.step_masks import CatchUp, no_catch_up, write_masks
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.step_result import LogitsObserver, SampledLogits
from ostinato.scheduling.step_plan import StepPlan


class Sampled(NamedTuple):
    """The tokens of a step on the device, as ``ResultRing.send`` takes them."""

    token_ids: torch.Tensor
    logprobs: tuple[torch.Tensor, torch.Tensor] | None = None
    filtered_rows: Sequence[int] | None = None


class StepSampler:
    """Samples over ``memory`` from the logits that ``model`` computes; counts in ``stats``.

    ``on_logits``, if set, receives the logits of every step. ``catch_up`` is called before masks
    are written: it must commit all steps before the one that runs.
    """

    def __init__(self, model: CausalLM, memory: StepMemory, stats: SamplerStats) -> None:
        self._model = model
        self._memory = memory
        self._stats = stats
        self.on_logits: LogitsObserver | None = None
        self.catch_up: CatchUp = no_catch_up

    @without_autocast
    def show_logits(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Pass the logits to the observer. Further rows of ``logits`` are padding."""
        if self.on_logits is not None:
            rows = range(1 + plan.num_drafts)
            requests = [item.request for item in plan.requests if item.samples]
            names = [request.request_id for request in requests for _ in rows]
            self.on_logits(SampledLogits(request_ids=names, logits=logits[: len(names)]))

    def write_masks(self, plan: StepPlan) -> None:
        """Write the masks of constrained requests, once the host has all their tokens."""
        start = time.perf_counter()
        self.catch_up()
        write_masks(plan, self._memory.state.sampling)
        self._stats.masked_steps += 1
        self._stats.mask_seconds += time.perf_counter() - start

    def sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled | None:
        """Sample after the last tokens of requests, where these are their last."""
        state = self._memory.state
        sampling = [item.req_index for item in plan.requests if item.samples]
        if not sampling:
            return None
        rows, req_indices = self._memory.buffers.sampling_rows(len(sampling))
        logits = self._model.compute_logits(hidden if plan.is_decode else hidden[rows])
        self.show_logits(plan, logits)
        # A request that samples has computed all its tokens.
        lengths = state.num_computed[req_indices]
        token_ids = torch.empty_like(req_indices)
        state.sampling.sample(logits, req_indices, lengths, token_ids)
        state.append(req_indices, lengths, token_ids)
        filtered = FilteredRows.among(sampling, state)
        if filtered is None:
            return Sampled(token_ids)
        if filtered.features.any_mask:
            self.write_masks(plan)
        return self._again(filtered, token_ids, logits, req_indices, lengths)

    def sample_drafts(self, plan: StepPlan, rows: DecodeState, logits: torch.Tensor) -> Sampled:
        """Sample after each token of a batch with drafts, and accept those that are the same."""
        memory = self._memory
        self.show_logits(plan, logits)
        draft_sampling.sample_drafts(memory, rows, logits)
        filtered = FilteredRows.among(list(plan.req_indices), memory.state, rows.query_len)
        if filtered is None:
            return Sampled(memory.buffers.drafts(rows).accepted.flatten())
        return self._drafts_again(filtered, rows, logits)

    @without_autocast
    def sample_again(
        self,
        filtered: FilteredRows,
        plan: StepPlan,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
    ) -> Sampled:
        """Sample the filtered rows of a decode step again, which ran without its graph."""
        state, buffers = self._memory.state, self._memory.buffers
        if not plan.num_drafts:
            seq_lens = buffers.tokens.seq_lens
            return self._again(filtered, token_ids, logits, buffers.req_indices, seq_lens)
        num_reqs, query_len = len(plan.requests), plan.max_query_len
        rows = draft_sampling.decode_rows(state, buffers, num_reqs, query_len)
        return self._drafts_again(filtered, rows, logits)

    def _again(
        self,
        filtered: FilteredRows,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        req_indices: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Sampled:
        self._stats.launches[SamplerLaunch.NO_DECODE_GRAPH] += 1
        state = self._memory.state
        token_ids, logprobs = filtered.sample(state, token_ids, logits, req_indices, lengths)
        return Sampled(token_ids, logprobs, filtered.positions)

    def _drafts_again(
        self, filtered: FilteredRows, rows: DecodeState, logits: torch.Tensor
    ) -> Sampled:
        self._stats.launches[SamplerLaunch.NO_DECODE_GRAPH] += 1
        accepted, logprobs = draft_sampling.sample_again(self._memory, rows, logits, filtered)
        return Sampled(accepted, logprobs, filtered.positions)
