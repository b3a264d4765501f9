"""The runner's seam for ``verify``: runs the steps that are compared, and quarantines graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.shadow.operator_log import OperatorLogging
from ostinato.graphs.trust.shadow.report import Mismatch, VerifyReport
from ostinato.graphs.trust.shadow.schedule import ShadowSchedule
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep, observe_captures
from ostinato.models.base import CausalLM, module_of
from ostinato.runner.model_graphs import Forward, ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.verify.memory_names import MemoryNames
from ostinato.runner.verify.step_parts import forward_parts, sampler_parts, token_parts
from ostinato.scheduling.step_plan import StepPlan

Key = tuple[int, CUDAGraphMode, BatchDescriptor]


class StepShadow:
    """Compares steps of one runner with eager runs, as ``policy`` says.

    Every step must ask ``takes`` once, so that ranks that run the same steps compare the same
    ones.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        memory: StepMemory,
        all_graphs: Sequence[ModelGraphs],
        samplers: SamplerGraphs,
        pool: GraphPool,
        *,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._schedule = ShadowSchedule(policy)
        self.report = VerifyReport()
        self._memory = memory
        self._all_graphs = all_graphs
        self._samplers = samplers
        self._agree = agree
        self._shadow = self._shadow_of(pool)
        samplers.observe = observe_captures

    def _shadow_of(self, pool: GraphPool) -> Shadow:
        # Nothing here refers to this object: a dropped engine must be freed at once.
        names = MemoryNames(self._memory, self._all_graphs)
        return Shadow(pool, name_of=names, agree=self._agree, report=self.report)

    # --- which steps ---------------------------------------------------------------------------

    @property
    def policy(self) -> VerifyPolicy:
        return self._schedule.policy

    def takes(self, choice: Choice) -> bool:
        """Whether the step that runs as chosen is compared; counts it."""
        return self._schedule.takes(_key(choice))

    def takes_sampler(self, graph: SamplerGraph) -> bool:
        """Whether the full sampler of this step, if it is a graph, is compared."""
        if graph.tape is None:
            return False
        first = self.policy.at_capture and not graph.is_compared
        return first or self._schedule.samples_this

    # --- steps of the service ------------------------------------------------------------------

    def decode(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> torch.Tensor:
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
        samplers, num_rows = self._samplers, graph.logits.shape[0]
        pool, tape = samplers.pool, graph.tape
        assert pool is not None, "the graph is in it"
        assert tape is not None, "it takes only captured ones"

        def eager(
            *, other_padding: bool = False, logging: OperatorLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            del other_padding  # rows are sampled one by one, from the logits that are there
            with logging or nullcontext():
                samplers.sample(graph)
            return {}

        def replay() -> Mapping[str, torch.Tensor]:
            pool.replay(tape)
            return {}

        parts = [name for name, used in graph.kind._asdict().items() if used]
        step = ShadowedStep(
            graph=f"sampler graph of {num_rows} rows ({', '.join(parts)})",
            tape=tape,
            eager=eager,
            replay=replay,
            parts=list(sampler_parts(self._memory, samplers, graph, req_indices)),
            rows={num_rows: slice(len(req_indices) * graph.query_len)},
        )
        graph.is_compared = True
        samplers.stats.replays += 1
        if self._shadow_of(pool).run(step, self._step) is not None:
            samplers.quarantine(graph)

    @property
    def _step(self) -> str:
        return f"step {self._schedule.num_steps}"

    def _run(self, step: ShadowedStep, choice: Choice) -> None:
        self.note(self.compare(step, self._step), choice)

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
        self._schedule.note(_key(choice), differs=mismatch is not None)
        if mismatch is not None:
            self._all_graphs[choice.model].quarantine(choice)

    def _models(self) -> list[CausalLM]:
        return [graphs.model for graphs in self._all_graphs]

    # --- a step that can run both ways ---------------------------------------------------------

    def decode_step(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> tuple[ShadowedStep, list[torch.Tensor]]:
        """A decode step whose rows are in the buffers, and the logits of its last replay."""
        graphs, memory = self._all_graphs[choice.model], self._memory
        req_indices = [int(row) for row in plan.req_indices]
        query_len, num_reqs = plan.max_query_len, len(req_indices)
        num_tokens = num_reqs * query_len
        full, latest = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def eager(
            *, other_padding: bool = False, logging: OperatorLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            forward = _padded_forward(
                graphs, num_tokens, other_padding, logging, is_logged=not full
            )
            with (logging if full else None) or nullcontext():
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
            eager=eager,
            replay=replay,
            parts=parts,
            rows=rows,
            num_grouping_layers=_num_mixtures(graphs.model),
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
        num_tokens = plan.num_tokens
        full, latest = choice.mode is CUDAGraphMode.FULL, list[torch.Tensor]()

        def eager(
            *, other_padding: bool = False, logging: OperatorLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            forward = _padded_forward(
                graphs, num_tokens, other_padding, logging, is_logged=not full
            )
            with (logging if full else None) or nullcontext():
                hidden = graphs.eager_hidden_states(choice, metadata, num_tokens, across, forward)
            return {"the hidden states": hidden}

        def replay() -> Mapping[str, torch.Tensor]:
            hidden = graphs.hidden_states(choice, metadata, num_tokens, across)
            latest[:] = [hidden]
            return {"the hidden states": hidden}

        query_lens = [item.num_tokens for item in plan.requests]
        step = ShadowedStep(
            graph=_named(choice),
            tape=graphs.tape(choice),
            eager=eager,
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
        )
        return step, latest


def _key(choice: Choice) -> Key | None:
    if choice.mode is CUDAGraphMode.NONE:
        return None
    return choice.model, choice.mode, choice.descriptor


def _num_mixtures(model: CausalLM) -> int:
    """Layers with a mixture of experts."""
    names = (name for name, _ in module_of(model).named_modules())
    return sum(name.rpartition(".")[2] in ("mixture", "experts") for name in names)


def _named(choice: Choice) -> str:
    key, kind = choice.descriptor, "decode" if choice.uniform_decode else "mixed"
    rows = "" if key.num_reqs is None else f", {key.num_reqs} requests"
    adapters = f", {key.num_active_loras} adapters" if key.has_lora else ""
    return f"{choice.mode.name} graph of {key.num_tokens} tokens{rows}{adapters} ({kind})"


def _unpadded(choice: Choice, num_tokens: int, num_reqs: int) -> Choice:
    descriptor = replace(choice.descriptor, num_tokens=num_tokens)
    return replace(choice, descriptor=descriptor, padded_num_reqs=num_reqs)


def _padded_forward(
    graphs: ModelGraphs,
    num_tokens: int,
    other_padding: bool,
    logging: OperatorLogging | None,
    *,
    is_logged: bool,
) -> Forward:
    """The model's forward, with other tokens as padding if that is asked for.

    ``is_logged``: the forward alone is what the graph contains; otherwise it is a part of that.
    """

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if other_padding and num_tokens < len(input_ids):
            padding = input_ids[num_tokens:]
            with nullcontext() if logging is None else logging.paused():
                padding.copy_((padding + 1) % graphs.model.vocab_size)
        with (logging if is_logged else None) or nullcontext():
            return graphs.eager_forward(input_ids, positions)

    return forward
