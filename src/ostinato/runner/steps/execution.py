"""How the parts of a step run, once dispatch has decided and the buffers are set.

The runner's seam for whatever must see graphs run: derive from ``StepExecution`` and pass the class
to the runner (``runner.verify`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.manager import FullGraph
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.shadow.report import VerifyReport
from ostinato.runner.ambient import without_autocast
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.scheduling.step_plan import IntArray, StepPlan

# Puts a plan's batch into the buffers, and returns what attention needs, if anything.
SetBatch: TypeAlias = Callable[[StepPlan, Choice], AttentionMetadata | None]


class StepExecution:
    """Runs each part as chosen: through its graph, in pieces or eagerly.

    ``all_graphs`` are by ``Choice.model``. Owns nothing. If ``replays_directly``, the runner
    replays whole decode graphs itself, which saves a call in every step, and ``decode`` runs the
    other decode steps. ``report``: which graphs were compared with eager; here, none.
    """

    replays_directly = True

    def __init__(
        self,
        memory: StepMemory,
        all_graphs: Sequence[ModelGraphs],
        samplers: SamplerGraphs,
        pool: GraphPool,
        ledger: Ledger,
    ) -> None:
        del memory, ledger
        self._all_graphs = all_graphs
        self._samplers = samplers
        self._pool = pool
        self.report = VerifyReport()

    @without_autocast
    def decode(
        self,
        graph: FullGraph | None,
        plan: StepPlan,
        choice: Choice,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a decode step, by the ``graph`` of the whole step if there is one.

        Returns its logits, padding included.
        """
        del plan
        if graph is None:
            return self._all_graphs[choice.model].decode(choice, across).logits
        self._pool.replay(graph.tape)
        logits: torch.Tensor = graph.output.logits
        return logits

    def hidden_states(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the forward of any other batch; returns its hidden states, without padding."""
        graphs = self._all_graphs[choice.model]
        return graphs.hidden_states(choice, metadata, plan.num_tokens, across)

    def sample(self, graph: SamplerGraph, req_indices: list[int] | IntArray) -> None:
        """Run the full sampler of a decode step, right after it."""
        del req_indices
        self._samplers.run(graph)

    def try_captured(
        self, graphs: ModelGraphs, entries: Sequence[PlanEntry], set_batch: SetBatch
    ) -> None:
        """These were just captured, or failed; the buffers may be overwritten."""
