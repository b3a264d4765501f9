"""A step of any batch that is not one replay: filled, run, and sampled.

These are batches with prompts, and decode batches with drafts whose length has no graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.lora.adapter_weights import AdapterWeights
from ostinato.models.base import CausalLM
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.sampling.step_sampler import Sampled, StepSampler
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.steps.execution import StepExecution
from ostinato.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from ostinato.vision.image_inputs import ImageInputs


class MixedStep:
    """Runs such steps over ``memory``, through ``execution``. ``model`` computes the logits.

    Like all steps, it waits for nothing, unless a request is constrained.
    """

    def __init__(
        self,
        model: CausalLM,
        memory: StepMemory,
        execution: StepExecution,
        sampler: StepSampler,
        *,
        adapters: AdapterWeights | None,
        images: ImageInputs | None,
    ) -> None:
        self._model = model
        self._memory = memory
        self._execution = execution
        self._sampler = sampler
        self._adapters = adapters
        self._images = images

    def run(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> Sampled | None:
        """Run a batch with prompts; None if none of its requests samples.

        The host passes the number of tokens of each request.
        """
        with self._images_of(plan):
            metadata = self.fill(plan, choice)
            hidden = self._execution.hidden_states(plan, choice, metadata, across)
        if choice.mode is not CUDAGraphMode.FULL:
            self._memory.advance(len(plan.requests))
        return self._sampler.sample(plan, hidden)

    def run_drafts(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> Sampled:
        """Run a decode batch with drafts: it has no graph for its query length."""
        memory, model = self._memory, self._model
        buffers, req_indices = memory.buffers, list(plan.req_indices)
        buffers.set_rows(req_indices, len(req_indices))
        rows = draft_sampling.decode_rows(
            memory.state, buffers, len(req_indices), plan.max_query_len
        )
        draft_sampling.propose_drafts(memory, rows, model.vocab_size)
        metadata = self.fill(plan, choice)
        hidden = self._execution.hidden_states(plan, choice, metadata, across)
        draft_sampling.observe_step(memory, rows)
        return self._sampler.sample_drafts(plan, rows, model.compute_logits(hidden))

    def read_by_proposer(self, plan: StepPlan) -> None:
        """Show a batch with prompts, once it is sampled, to what proposes drafts, if it must."""
        if self._memory.drafts_read_all:
            metadata = self._metadata(plan, len(plan.requests), plan.num_tokens)
            draft_sampling.read_step(self._memory, metadata)

    def fill(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Fill the buffers with a batch, padded as chosen; without requests it is all padding.

        A FULL graph does most of that itself, and needs no metadata.
        """
        requests, padded_tokens = plan.requests, choice.padded_num_tokens
        padded_reqs = choice.padded_num_reqs or max(len(requests), 1)
        self._memory.buffers.set_queries(
            [item.req_index for item in requests],
            [item.num_tokens for item in requests],
            [item.samples for item in requests],
        )
        if self._adapters is not None and choice.descriptor.has_lora:
            self._adapters.set_rows(plan.lora_slots, [item.num_tokens for item in requests])
        if choice.mode is CUDAGraphMode.FULL:
            return None
        self._memory.fill(num_reqs=padded_reqs, num_tokens=padded_tokens)
        return self._metadata(plan, padded_reqs, padded_tokens)

    def _images_of(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Inside, the model and the inputs have the images of the batch."""
        offsets = self._memory.buffers.position_offsets
        if self._images is None or offsets is None:
            return nullcontext()
        return self._images.placed(plan.requests, offsets)

    def _metadata(self, plan: StepPlan, num_reqs: int, num_tokens: int) -> AttentionMetadata:
        """The batch in the buffers as attention sees it, padded or not."""
        most = max((item.max_seq_len for item in plan.requests), default=1)
        return self._memory.metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max(plan.max_query_len, 1),
            max_seq_len=min(most, self._memory.cache.max_model_len),
            selected=True,
            uniform_decode=False,
            query_lens=[item.num_tokens for item in plan.requests],
        )
