"""The runner's seam for ``verify``: runs the steps that are compared, and quarantines graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.shadow.report import Mismatch, VerifyReport
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep
from ostinato.models.base import CausalLM
from ostinato.runner.model_graphs import Forward, ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.verify.step_parts import forward_parts, sampler_parts, token_parts
from ostinato.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

Key = tuple[int, CUDAGraphMode, BatchDescriptor]


class StepShadow:
    """Compares steps of one runner with eager runs, as ``policy`` says.

    Every step must ask ``takes`` once, so that ranks that run the same steps compare the same
    ones. After a mismatch every graph is compared again in its next step: what is wrong with one
    is often wrong with others.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        memory: StepMemory,
        all_graphs: Sequence[ModelGraphs],
        samplers: SamplerGraphs,
        pool: GraphPool,
        *,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.policy = policy
        self.report = VerifyReport()
        self._memory = memory
        self._all_graphs = all_graphs
        self._samplers = samplers
        self._agree = agree
        self._num_steps = 0
        self._takes_this = False
        self._trusted: set[Key] | None = None  # since the last mismatch; None: there was none
        self._shadow = self._shadow_of(pool)
        self._sampler_shadow: Shadow | None = None
        samplers.on_pool = self._watch_samplers

    def _shadow_of(self, pool: GraphPool) -> Shadow:
        return Shadow(pool, name_of=self._name_of, agree=self._agree, report=self.report)

    def _watch_samplers(self, pool: GraphPool) -> None:
        self._sampler_shadow = self._shadow_of(pool)

    # --- which steps ---------------------------------------------------------------------------

    def takes(self, choice: Choice) -> bool:
        """Whether the step that runs as chosen is compared; counts it."""
        sampled = self.policy.samples(self._num_steps)
        self._num_steps += 1
        key = choice.model, choice.mode, choice.descriptor
        suspect = self._trusted is not None and key not in self._trusted
        self._takes_this = sampled
        return (sampled or suspect) and choice.mode is not CUDAGraphMode.NONE

    def takes_sampler(self, graph: SamplerGraph) -> bool:
        """Whether the full sampler of this step, if it is a graph, is compared."""
        if graph.tape is None:
            return False
        first = self.policy.at_capture and not graph.is_compared
        return first or self._takes_this

    # --- steps of the service ------------------------------------------------------------------

    def decode(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> torch.Tensor:
        """Run a decode step both ways; returns its logits, padding included."""
        step, logits = self.decode_step(plan, choice, across)
        self._run(step, choice)
        return logits[0]

    def hidden_states(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the forward of a mixed batch both ways; returns its hidden states."""
        step, hidden = self.mixed_step(plan, choice, metadata, across)
        self._run(step, choice)
        return hidden[0]

    def sampler(self, graph: SamplerGraph, req_indices: Sequence[int]) -> None:
        """Run the full sampler both ways."""
        assert graph.tape is not None and self._sampler_shadow is not None, "it is a graph"
        samplers, num_rows = self._samplers, graph.logits.shape[0]

        def eager(
            *, other_padding: bool = False, around: AbstractContextManager[Any] | None = None
        ) -> Mapping[str, torch.Tensor]:
            del other_padding  # rows are sampled one by one, from the logits that are there
            with around or nullcontext():
                samplers.sample(graph)
            return {}

        pool, tape = self._sampler_shadow.pool, graph.tape

        def replay() -> Mapping[str, torch.Tensor]:
            pool.replay(tape)
            return {}

        step = ShadowedStep(
            graph=f"the sampler of {num_rows} rows, {graph.kind}",
            tape=tape,
            eager=eager,
            replay=replay,
            parts=list(sampler_parts(self._memory, samplers, graph, req_indices)),
            rows={num_rows: slice(len(req_indices) * graph.query_len)},
        )
        graph.is_compared = True
        samplers.stats.replays += 1
        if self._sampler_shadow.run(step, f"step {self._num_steps}") is not None:
            samplers.quarantine(graph)

    def _run(self, step: ShadowedStep, choice: Choice) -> None:
        self.note(self.compare(step, f"step {self._num_steps}"), choice)

    def compare(self, step: ShadowedStep, found: str) -> Mismatch | None:
        """``Shadow.run``, for graphs of the model."""
        return self._shadow.run(step, found)

    def check_row(
        self,
        step: ShadowedStep,
        change_others: AbstractContextManager[None],
        rows: Mapping[int, slice],
        found: str,
    ) -> Mismatch | None:
        """``Shadow.check_row``, for graphs of the model."""
        return self._shadow.check_row(step, change_others, rows, found)

    def note(self, mismatch: Mismatch | None, choice: Choice) -> None:
        """Quarantine the graph if there is a ``mismatch``; otherwise it is trusted again."""
        if mismatch is not None:
            self._trusted = set()
            self._all_graphs[choice.model].quarantine(choice)
        elif self._trusted is not None:
            self._trusted.add((choice.model, choice.mode, choice.descriptor))

    # --- a step that can run both ways ---------------------------------------------------------

    def decode_step(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """A decode step whose rows are in the buffers, and where its last replay left its logits."""
        graphs, memory = self._all_graphs[choice.model], self._memory
        req_indices = [int(row) for row in plan.req_indices]
        query_len, num_reqs = plan.max_query_len, len(req_indices)
        num_tokens, padded_reqs = num_reqs * query_len, choice.padded_num_reqs
        assert padded_reqs is not None, "it is a decode batch"
        full, latest = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def eager(
            *, other_padding: bool = False, around: AbstractContextManager[Any] | None = None
        ) -> Mapping[str, torch.Tensor]:
            inner = nullcontext() if full else around
            forward = self._forward(graphs, num_tokens, other_padding, inner)
            with (around if full else None) or nullcontext():
                logits = graphs.decode(choice, across, eager_forward=forward).logits
            return {"the logits": logits[:num_tokens]}

        def replay() -> Mapping[str, torch.Tensor]:
            if full:
                graph = graphs.decode_graph(choice)
                assert graph is not None, "it is a whole graph"
                self._shadow.pool.replay(graph.tape)
                logits = graph.output.logits
            else:
                logits = graphs.decode(choice, across).logits
            latest[:] = [logits]
            return {"the logits": logits[:num_tokens]}

        def alone() -> Mapping[str, torch.Tensor]:
            unpadded = _unpadded(choice, num_tokens, num_reqs)
            output = graphs.decode(unpadded, across, eager_forward=graphs.eager_forward)
            return {"the logits": output.logits}

        parts = [
            *forward_parts(
                memory, self._models, req_indices, [query_len] * num_reqs, choice.padded_num_tokens
            ),
            *token_parts(memory, req_indices, query_len),
        ]
        rows = {choice.padded_num_tokens: slice(num_tokens), padded_reqs: slice(num_reqs)}
        step = ShadowedStep(
            graph=_named(choice),
            tape=graphs.tape(choice),
            eager=eager,
            replay=replay,
            parts=parts,
            rows=rows,
            alone=alone,
        )
        return step, latest

    def mixed_step(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """The forward of a mixed batch, which is set in the buffers; and its last hidden states."""
        graphs, memory = self._all_graphs[choice.model], self._memory
        num_tokens, num_reqs = plan.num_tokens, len(plan.requests)
        full, latest = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def eager(
            *, other_padding: bool = False, around: AbstractContextManager[Any] | None = None
        ) -> Mapping[str, torch.Tensor]:
            inner = nullcontext() if full else around
            forward = self._forward(graphs, num_tokens, other_padding, inner)
            with (around if full else None) or nullcontext():
                hidden = graphs.eager_hidden_states(choice, metadata, num_tokens, across, forward)
            return {"the hidden states": hidden}

        def replay() -> Mapping[str, torch.Tensor]:
            hidden = graphs.hidden_states(choice, metadata, num_tokens, across)
            latest[:] = [hidden]
            return {"the hidden states": hidden}

        query_lens = [item.num_tokens for item in plan.requests]
        padded_reqs = choice.padded_num_reqs or num_reqs
        step = ShadowedStep(
            graph=_named(choice),
            tape=graphs.tape(choice),
            eager=eager,
            replay=replay,
            parts=list(
                forward_parts(
                    memory,
                    self._models,
                    [item.req_index for item in plan.requests],
                    query_lens,
                    choice.padded_num_tokens,
                )
            ),
            rows={padded_reqs: slice(num_reqs), choice.padded_num_tokens: slice(num_tokens)},
        )
        return step, latest

    def _forward(
        self,
        graphs: ModelGraphs,
        num_tokens: int,
        other_padding: bool,
        around: AbstractContextManager[Any] | None,
    ) -> Forward:
        """The model's forward, with other tokens as padding if that is asked for."""
        model = graphs.eager_forward

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if other_padding and num_tokens < len(input_ids):
                padding = input_ids[num_tokens:]
                padding.copy_((padding + 1) % graphs.model.vocab_size)
            with around or nullcontext():
                return model(input_ids, positions)

        return forward

    # --- names of memory -----------------------------------------------------------------------

    @property
    def _models(self) -> list[CausalLM]:
        return [graphs.model for graphs in self._all_graphs]

    def _name_of(self, address: int) -> str | None:
        for name, tensor in self._named_memory():
            start = tensor.untyped_storage().data_ptr()
            if start <= address < start + tensor.untyped_storage().nbytes():
                return name
        return None

    def _named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model in self._models:
            if isinstance(model, nn.Module):
                yield from model.named_parameters()
                yield from model.named_buffers()
        for number, pair in enumerate(self._memory.kv_cache.layers):
            for kind, tensor in zip(("keys", "values"), pair, strict=True):
                yield f"the {kind} of layer {number} (KV cache)", tensor
        memory = self._memory
        owners: Iterable[object] = (memory.state, memory.state.sampling, memory.buffers)
        for owner in owners:
            for name, value in vars(owner).items():
                if isinstance(value, torch.Tensor):
                    yield f"{type(owner).__name__}.{name}", value


def _named(choice: Choice) -> str:
    return f"{choice.mode.name} graph {choice.descriptor}"


def _unpadded(choice: Choice, num_tokens: int, num_reqs: int) -> Choice:
    descriptor = replace(choice.descriptor, num_tokens=num_tokens)
    return replace(choice, descriptor=descriptor, padded_num_reqs=num_reqs)
