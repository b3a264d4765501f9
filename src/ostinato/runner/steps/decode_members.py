"""A decode batch whose rows are in the buffers: what runs it, and where its results are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.graphs.manager import FullGraph
from ostinato.graphs.policy.descriptor import Choice
from ostinato.lora.adapter_weights import AdapterWeights
from ostinato.runner.sampling.filtered_rows import FilteredRows
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.scheduling.step_plan import IntArray, StepPlan


@dataclass(frozen=True, kw_only=True)
class DecodeMembers:
    """The requests of a decode batch; reused from step to step.

    ``graph``: of the whole step, if there is one. If a request needs the full sampler, ``sampler``
    runs behind that graph, and ``filtered`` behind a step without it. ``sampled`` [num_reqs], or
    ``accepted`` tokens as in ``Drafts``, flat, and ``logprobs`` (None: not wanted) are where their
    tokens are written. ``has_masks``: one of the requests is constrained.
    """

    req_indices: list[int] | IntArray
    choice: Choice
    graph: FullGraph | None
    sampler: SamplerGraph | None
    filtered: FilteredRows | None
    sampled: torch.Tensor
    logprobs: tuple[torch.Tensor, torch.Tensor] | None
    has_masks: bool

    def hold(self, plan: StepPlan, choice: Choice) -> bool:
        """Whether they are the requests of this step, which runs as chosen."""
        rows = plan.req_indices
        if self.choice != choice:  # by value: ranks that agree build an equal choice every step
            return False
        if self.req_indices is rows:
            return True
        # Steps with drafts are not planned as a steady state, but are seldom different.
        return (
            plan.num_drafts > 0
            and self.req_indices == rows
            and not any(item.is_new for item in plan.requests)
        )

    @classmethod
    def place(
        cls,
        plan: StepPlan,
        choice: Choice,
        graph: FullGraph | None,
        memory: StepMemory,
        samplers: SamplerGraphs,
        adapters: AdapterWeights | None,
    ) -> DecodeMembers:
        """Write the rows of the plan's requests to the buffers, padded as chosen, and their
        adapters, if the graph has some.
        """
        rows, query_len = plan.req_indices, plan.max_query_len
        req_indices = rows if isinstance(rows, list) else rows.tolist()
        buffers, parameters = memory.buffers, memory.state.sampling
        num_reqs = len(req_indices)
        assert choice.padded_num_reqs is not None, "it is a decode batch"
        buffers.set_rows(req_indices, choice.padded_num_reqs)
        sampler = filtered = logprobs = None
        if graph is None:
            filtered = FilteredRows.among(req_indices, memory.state, query_len)
        elif parameters.filtered_rows(req_indices):
            features = parameters.features(req_indices)
            sampler = samplers.graph(graph, features, query_len)
            if features.num_logprobs >= 0:
                logprobs = samplers.logprobs(num_reqs * query_len)
        sampled = buffers.sampled[:num_reqs]
        if query_len > 1:
            sampled = buffers.accepted[: num_reqs * (query_len + 1)]
        if adapters is not None and choice.descriptor.has_lora:
            slots = plan.lora_slots
            adapters.set_rows(slots, [query_len] * len(slots) if query_len > 1 else None)
        return cls(
            req_indices=rows,
            choice=choice,
            graph=graph,
            sampler=sampler,
            filtered=filtered,
            sampled=sampled,
            logprobs=logprobs,
            has_masks=parameters.has_masks(req_indices),
        )
