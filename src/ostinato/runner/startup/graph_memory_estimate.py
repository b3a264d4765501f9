"""Estimates the memory of graphs before their capture, and keeps a plan within a budget.

The pool is as large as the largest graph needs, which an eager step of its size tells. Graphs
themselves take memory of the driver, by their number and by their nodes. What sizes are worth
without any measurement follows from assumptions, stated below; ``ostinato plan graphs`` chooses
from measured costs and observed batches instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ostinato.attention.base import AttentionBackend
from ostinato.config import EngineConfig
from ostinato.errors import CaptureOutOfMemoryError, ConfigError
from ostinato.graphs.policy.choose_sizes import BatchKind, GraphLimits, choose_sizes
from ostinato.graphs.policy.graph_memory import GraphMemory, in_words
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.models.base import CausalLM
from ostinato.runner.capture.planned_capture import BESIDE_LOGITS
from ostinato.runner.startup import kv_budget
from ostinato.runner.startup.graph_plans import GraphPlans

logger = logging.getLogger(__name__)


class _DeviceCosts(NamedTuple):
    """Bytes of a graph, of a node in it, and of libraries' workspaces; and nodes of a layer.

    The nodes are those of whole graphs, of mixed and of decode batches, and of pieces.
    """

    graph: int
    node: int
    workspaces: int
    mixed_nodes: int
    decode_nodes: int
    piece_nodes: int


# CUDA: an H200 with CUDA 13, whose driver takes memory in steps of 2 MiB. The CPU: Python objects.
_COSTS = {
    "cuda": _DeviceCosts(115_000, 2_700, 32 * 2**20, mixed_nodes=14, decode_nodes=9, piece_nodes=7),
    "cpu": _DeviceCosts(500, 850, 0, mixed_nodes=13, decode_nodes=13, piece_nodes=12),
}

# A pool is larger than the peak of an eager step: blocks do not fit exactly. Measured on an H200,
# 1.04 for a 1B model and 1.11 for an 8B model; on the CPU, 1.09 to 1.18.
_POOL_TO_PEAK = 1.07

# torch's CUDA allocator takes memory in multiples of 2 MiB, and keeps blocks of up to 1 MiB apart,
# of which graphs have 2 to 6 MiB.
_SEGMENT, _SMALL_BLOCK, _SMALL_BLOCKS = 2 * 2**20, 2**20, 4 * 2**20

# Of a budget, what estimates may be below the memory taken. Measured on an H200: up to 3%.
_MARGIN = 0.05

# Assumed where nothing was observed: 4 of 5 steps decode; batches of n tokens are as frequent as
# 1 / n; a step takes as long as reading the weights, up to the number of tokens whose arithmetic
# takes as long; an eager step takes the host at least three times that, and a tenth more than a
# replay of the same size.
_DECODE_SHARE, _BALANCED_TOKENS, _EAGER_STEP, _EAGER_MORE = 0.8, 256, 3.0, 1.1


@dataclass(frozen=True, kw_only=True)
class GraphEstimate:
    """What the graphs of ``model`` will take, by plan. ``activations``: of its largest graph."""

    model: CausalLM
    largest: int
    activations: int

    @classmethod
    def measure(
        cls, config: EngineConfig, model: CausalLM, plans: GraphPlans, backend: AttentionBackend
    ) -> GraphEstimate:
        """Run an eager step as large as the largest graph of the plans, if there is any."""
        plan = plans.model
        entries = [*plan.entries, *(plans.shift.entries if plans.shift is not None else ())]
        largest = max((entry.descriptor.num_tokens for entry in entries), default=0)
        activations = 0
        if largest:
            # A second model captures into the same pool, and its activations are no larger.
            padded = plan.padded_tokens(largest)
            try:
                activations = kv_budget.activation_bytes(
                    model, plan, padded, config, backend, logits=False
                )
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise CaptureOutOfMemoryError(
                    f"out of memory in a step of {padded} tokens, the size of the largest graph: "
                    f"{error}. Lower the capture sizes, or take a smaller or quantized model"
                ) from error
        return cls(model=model, largest=largest, activations=activations)

    def of(self, plans: GraphPlans) -> GraphMemory:
        """The estimate for ``plans``, whose graphs are at most as large as the one measured."""
        every = [plan for plan in (plans.model, plans.shift) if plan is not None and plan.entries]
        if not every:
            return GraphMemory()
        entries = [entry for plan in every for entry in plan.entries]
        largest = max(entry.descriptor.num_tokens for entry in entries)
        decode = max((each.descriptor.num_tokens for each in entries if _samples(each)), default=0)
        return GraphMemory(
            pool=self._pool(largest, decode, beside_mixed=not all(map(_samples, entries))),
            executable=sum(map(self.executable, entries)),
            buffers=sum(map(self._buffers, every)),
            workspaces=_COSTS[self.model.device.type].workspaces,
        )

    def executable(self, entry: PlanEntry) -> int:
        """Memory of an entry's graphs beside the pool."""
        num_layers = len(self.model.attention_specs) + len(self.model.recurrent_specs)
        costs = _COSTS[self.model.device.type]
        if entry.mode is CUDAGraphMode.PIECEWISE:
            return (num_layers + 1) * costs.graph + num_layers * costs.piece_nodes * costs.node
        nodes = costs.decode_nodes if entry.descriptor.uniform else costs.mixed_nodes
        return costs.graph + num_layers * nodes * costs.node

    def _pool(self, largest: int, decode: int, *, beside_mixed: bool) -> int:
        """The pool of graphs of up to ``largest`` tokens, and ``decode`` in a decode step.

        ``beside_mixed``: whether mixed batches have graphs in it as well.
        """
        logits = decode * self.model.vocab_size * self.model.dtype.itemsize
        if self.model.device.type == "cpu":
            return max(self._activations(largest), self._activations(decode) + logits)
        # A block is reserved for the logits, because torch does not join smaller ones.
        reserved = _in_segments(logits + BESIDE_LOGITS)
        activations = self._activations(largest)
        if activations > reserved:
            return reserved + activations + _SMALL_BLOCKS
        if not beside_mixed or decode * self._row_bytes <= _SMALL_BLOCK:
            return reserved + _SMALL_BLOCKS
        # The graphs of mixed batches leave hidden states in that block: the logits get another.
        return reserved + _in_segments(logits) + _SMALL_BLOCKS

    def _activations(self, num_tokens: int) -> int:
        peak = self.activations * num_tokens / max(self.largest, 1)
        return int(_POOL_TO_PEAK * peak)

    def _buffers(self, plan: CapturePlan) -> int:
        """Outputs of whole graphs of mixed batches."""
        if plan.mode.mixed_mode() is not CUDAGraphMode.FULL:
            return 0
        return max(plan.mixed_sizes, default=0) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.model.hidden_size * self.model.dtype.itemsize

    # --- a budget ------------------------------------------------------------------------------

    def within(self, plans: GraphPlans, budget: int) -> GraphPlans:
        """The plans without the sizes that are worth the least, so that the rest fits ``budget``.

        The log names the sizes that were dropped.
        """
        plan, memory = plans.model, self.of(plans)
        room = int(budget * (1 - _MARGIN))
        if memory.total <= room:
            return plans
        assert plans.shift is None, "refused by the configuration"
        kinds = self._kinds(plan)
        room = max(0, room - memory.workspaces)
        chosen = dict(
            zip(
                kinds,
                choose_sizes(list(kinds.values()), GraphLimits(max_bytes=room)),
                strict=True,
            )
        )
        kept = plan.with_sizes(
            chosen.get("decode", ()) if "decode" in kinds else chosen["mixed"],
            mixed_sizes=chosen.get("mixed", ()),
            token_multiple=plan.token_multiple,
        )
        if not kept.entries:
            least = min(self._least(kind) for kind in kinds.values()) + memory.workspaces
            least = int(least / (1 - _MARGIN))
            raise ConfigError(
                f"graph_memory {in_words(budget)} is too small for any graph of this model: the "
                f"smallest needs "
                f"{in_words(least)}; raise it, or turn graphs off with GraphConfig(mode='NONE')"
            )
        within = replace(plans, model=kept)
        dropped = {name: _without(kind.sizes, chosen[name]) for name, kind in kinds.items()}
        logger.warning(
            "graph_memory %s holds %d of %d planned graphs, an estimated %s; left out: %s",
            in_words(budget),
            len(kept.entries),
            len(plan.entries),
            self.of(within),
            "; ".join(f"{name} sizes {list(sizes)}" for name, sizes in dropped.items() if sizes),
        )
        return within

    def _least(self, kind: BatchKind) -> int:
        return kind.bytes_of(kind.sizes[:1])

    def _kinds(self, plan: CapturePlan) -> dict[str, BatchKind]:
        """The batches that graphs are for, with their assumed frequencies and costs."""
        kinds = {}
        separate = plan.mode.separate_routine()
        decode_sizes = _without(plan.sizes, plan.sizes_without_decode) if separate else ()
        decode = max(decode_sizes, default=0)
        has_mixed = plan.mode.mixed_mode() is not CUDAGraphMode.NONE
        if decode_sizes:
            kinds["decode"] = BatchKind(
                steps=_assumed_steps(plan.max_num_seqs, _DECODE_SHARE),
                sizes=decode_sizes,
                replay=_assumed_replay,
                eager=_assumed_eager,
                graph_bytes=self._bytes_per_size(plan, uniform=True),
                pool_bytes=lambda size: self._pool(size, size, beside_mixed=has_mixed),
            )
        if has_mixed:
            row = self._row_bytes if plan.mode.mixed_mode() is CUDAGraphMode.FULL else 0
            kinds["mixed"] = BatchKind(
                steps=_assumed_steps(plan.max_num_batched_tokens, 1 - _DECODE_SHARE),
                sizes=plan.mixed_sizes,
                replay=_assumed_replay,
                eager=_assumed_eager,
                graph_bytes=self._bytes_per_size(plan, uniform=False),
                pool_bytes=lambda size: self._pool(size, decode, beside_mixed=True) + size * row,
            )
        return kinds

    def _bytes_per_size(self, plan: CapturePlan, *, uniform: bool) -> int:
        """Memory of all graphs of one size: for each number of adapters, each query length."""
        sizes: dict[int, int] = {}
        for entry in plan.entries:
            if entry.descriptor.uniform is uniform:
                num_tokens = entry.descriptor.num_tokens
                sizes[num_tokens] = sizes.get(num_tokens, 0) + self.executable(entry)
        return max(sizes.values(), default=0)


def _in_segments(num_bytes: int) -> int:
    return -(-num_bytes // _SEGMENT) * _SEGMENT


def _without(sizes: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """Of ``sizes``, those that are not among ``others``."""
    return tuple(size for size in sizes if size not in set(others))


def _samples(entry: PlanEntry) -> bool:
    return entry.mode is CUDAGraphMode.FULL and entry.descriptor.uniform


def _assumed_steps(most: int, share: float) -> dict[int, float]:
    total = sum(1 / num_tokens for num_tokens in range(1, most + 1))
    return {num_tokens: share / num_tokens / total for num_tokens in range(1, most + 1)}


def _assumed_replay(num_tokens: int) -> float:
    return 1 + num_tokens / _BALANCED_TOKENS


def _assumed_eager(num_tokens: int) -> float:
    return max(_EAGER_STEP, _EAGER_MORE * _assumed_replay(num_tokens))
