"""Steps of the runner that can run both ways: through their graph, and eagerly in its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.trust.shadow.call_log import CallLogging
from ostinato.graphs.trust.shadow.shadow import ShadowedStep
from ostinato.models.base import CausalLM
from ostinato.runner.model_graphs import Forward, ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.verify.step_parts import forward_parts, sampler_parts, token_parts
from ostinato.scheduling.step_plan import StepPlan


class BothWays:
    """Describes the steps of one runner, whose batch is in the buffers, for ``Shadow``."""

    def __init__(
        self, memory: StepMemory, all_graphs: Sequence[ModelGraphs], pool: GraphPool
    ) -> None:
        self._memory = memory
        self._all_graphs = all_graphs
        self._pool = pool

    def _models(self) -> list[CausalLM]:
        return [graphs.model for graphs in self._all_graphs]

    def decode_step(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """A decode step whose rows are in the buffers, and its logits: those of its first replay,
        where ``Shadow.run`` leaves the right ones.
        """
        graphs, memory = self._all_graphs[choice.model], self._memory
        req_indices = [int(row) for row in plan.req_indices]
        query_len, num_reqs = plan.max_query_len, len(req_indices)
        num_tokens = num_reqs * query_len
        full, first = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def run_eagerly(forward: Forward) -> Mapping[str, torch.Tensor]:
            logits = graphs.decode(choice, across, eager_forward=forward).logits
            return {"the logits": logits[:num_tokens]}

        def replay() -> Mapping[str, torch.Tensor]:
            if full:
                graph = graphs.decode_graph(choice)
                assert graph is not None, "it is a whole graph"
                self._pool.replay(graph.tape)
                logits = graph.output.logits
            else:
                logits = graphs.decode(choice, across).logits
            if not first:
                first.append(logits)
            return {"the logits": logits[:num_tokens]}

        def alone() -> Mapping[str, torch.Tensor]:
            unpadded = _unpadded(choice, num_tokens, num_reqs)
            output = graphs.decode(unpadded, across, eager_forward=graphs.eager_forward)
            return {"the logits": output.logits}

        parts = [
            *forward_parts(
                memory,
                self._models(),
                req_indices,
                [query_len] * num_reqs,
                choice.padded_num_tokens,
            ),
            *token_parts(memory, req_indices, query_len),
        ]
        rows = {choice.padded_num_tokens: slice(num_tokens)}
        step = ShadowedStep(
            graph=_named(choice),
            tape=graphs.tape(choice),
            eager=_EagerStep(graphs, num_tokens, run_eagerly, is_whole=full),
            replay=replay,
            parts=parts,
            rows=rows,
            num_grouping_layers=_num_mixtures(graphs.model),
            exact=graphs.model.batch_invariant,
            alone=alone,
        )
        return step, first

    def mixed_step(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """The forward of a mixed batch, which is set in the buffers; and its hidden states, as
        ``decode_step``.
        """
        graphs, memory = self._all_graphs[choice.model], self._memory
        num_tokens = plan.num_tokens
        full, first = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def run_eagerly(forward: Forward) -> Mapping[str, torch.Tensor]:
            hidden = graphs.eager_hidden_states(choice, metadata, num_tokens, across, forward)
            return {"the hidden states": hidden}

        def replay() -> Mapping[str, torch.Tensor]:
            hidden = graphs.hidden_states(choice, metadata, num_tokens, across)
            if not first:
                first.append(hidden)
            return {"the hidden states": hidden}

        query_lens = [item.num_tokens for item in plan.requests]
        step = ShadowedStep(
            graph=_named(choice),
            tape=graphs.tape(choice),
            eager=_EagerStep(graphs, num_tokens, run_eagerly, is_whole=full),
            replay=replay,
            parts=list(
                forward_parts(
                    memory,
                    self._models(),
                    [item.req_index for item in plan.requests],
                    query_lens,
                    choice.padded_num_tokens,
                )
            ),
            rows={choice.padded_num_tokens: slice(num_tokens)},
            num_grouping_layers=_num_mixtures(graphs.model),
            exact=graphs.model.batch_invariant,
        )
        return step, first

    def sampler_step(
        self, samplers: SamplerGraphs, graph: SamplerGraph, req_indices: Sequence[int]
    ) -> ShadowedStep:
        """The full sampler of a decode step, right after that."""
        pool, tape, num_rows = samplers.pool, graph.tape, graph.logits.shape[0]
        assert pool is not None, "the graph is in it"
        assert tape is not None, "only captured ones are compared"

        def eager(
            *, other_padding: bool = False, logging: CallLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            del other_padding  # rows are sampled one by one, from the logits that are there
            with logging or nullcontext():
                samplers.sample(graph)
            return {}

        def replay() -> Mapping[str, torch.Tensor]:
            pool.replay(tape)
            return {}

        contents = [name for name, used in graph.kind._asdict().items() if used]
        return ShadowedStep(
            graph=f"sampler graph of {num_rows} rows ({', '.join(contents)})",
            tape=tape,
            eager=eager,
            replay=replay,
            parts=list(sampler_parts(self._memory, samplers, graph, req_indices)),
            rows={num_rows: slice(len(req_indices) * graph.query_len)},
        )


def _num_mixtures(model: CausalLM) -> int:
    """Layers with a mixture of experts."""
    names = (name for name, _ in model.module.named_modules())
    return sum(name.rpartition(".")[2] in ("mixture", "experts") for name in names)


def _named(choice: Choice) -> str:
    key, kind = choice.descriptor, "decode" if choice.uniform_decode else "mixed"
    rows = "" if key.num_reqs is None else f", {key.num_reqs} requests"
    adapters = f", {key.num_active_loras} adapters" if key.has_lora else ""
    return f"{choice.mode.name} graph of {key.num_tokens} tokens{rows}{adapters} ({kind})"


def _unpadded(choice: Choice, num_tokens: int, num_reqs: int) -> Choice:
    descriptor = replace(choice.descriptor, num_tokens=num_tokens)
    return replace(choice, descriptor=descriptor, padded_num_reqs=num_reqs)


class _EagerStep:
    """An ``EagerRun``: ``run`` with the model's forward, and other tokens as padding if asked.

    ``is_whole``: the graph contains all that ``run`` does, not the forward alone.
    """

    def __init__(
        self,
        graphs: ModelGraphs,
        num_tokens: int,
        run: Callable[[Forward], Mapping[str, torch.Tensor]],
        *,
        is_whole: bool,
    ) -> None:
        self._graphs = graphs
        self._num_tokens = num_tokens
        self._run = run
        self._is_whole = is_whole

    def __call__(
        self, *, other_padding: bool = False, logging: CallLogging | None = None
    ) -> Mapping[str, torch.Tensor]:
        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            padding = input_ids[self._num_tokens :]
            if other_padding and len(padding):
                with nullcontext() if logging is None else logging.paused():
                    padding.copy_((padding + 1) % self._graphs.model.vocab_size)
            with (None if self._is_whole else logging) or nullcontext():
                return self._graphs.eager_forward(input_ids, positions)

        with (logging if self._is_whole else None) or nullcontext():
            return self._run(forward)
