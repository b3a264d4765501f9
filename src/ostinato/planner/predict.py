"""Predictions for several layouts side by side, as plain data: steps, thresholds, loads.

The same GPUs can run a model in several ways: all tensor parallel, all sequence parallel, or a mix;
the last two with or without the shift model for small batches. A mixture of experts can also run as
replicas with the experts spread over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ostinato.planner.communication import MODELS, layer_collectives
from ostinato.planner.cost import KINDS, Kind, LayoutCost, Load, StepTime
from ostinato.planner.expert_parallel import ExpertParallelCost
from ostinato.planner.weights import rank_weights

DECODE_HEAVY = Load(name="decode-heavy", num_reqs=32, prompt_tokens=128, output_tokens=512)
PREFILL_HEAVY = Load(name="prefill-heavy", num_reqs=32, prompt_tokens=2048, output_tokens=32)


def loads(max_tokens: int) -> list[Load]:
    """Both loads, with no more requests than can decode together."""
    return [
        replace(load, num_reqs=min(load.num_reqs, max_tokens))
        for load in (DECODE_HEAVY, PREFILL_HEAVY)
    ]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A layout, with or without the shift model."""

    cost: LayoutCost
    shift: bool

    @property
    def name(self) -> str:
        if self.shift:
            return "shift"
        layout = self.cost.layout
        return "TP" if layout.sp == 1 else "SP" if layout.tp == 1 else "SP+TP"

    @property
    def threshold(self) -> int:
        return self.cost.threshold if self.shift else 0

    def step(self, kind: Kind, num_tokens: int) -> StepTime:
        return self.cost.shifted(kind, num_tokens, self.threshold)

    def seconds(self, kind: Kind, num_tokens: int) -> float:
        return self.step(kind, num_tokens).total


@dataclass(frozen=True, kw_only=True)
class ExpertWay:
    """Replicas with the experts spread over them."""

    cost: ExpertParallelCost
    name = "EP"
    threshold = 0

    def step(self, kind: Kind, num_tokens: int) -> StepTime:
        return self.cost.step(kind, num_tokens)

    def seconds(self, kind: Kind, num_tokens: int) -> float:
        return self.step(kind, num_tokens).total


AnyWay: TypeAlias = Way | ExpertWay


def ways(
    costs: Sequence[LayoutCost], spread: Sequence[ExpertParallelCost] = ()
) -> Sequence[AnyWay]:
    """All ways to use these layouts. Without SP, the shift model is the base model."""
    split = [
        Way(cost=cost, shift=shift)
        for cost in costs
        for shift in (False, True)
        if not shift or cost.layout.sp > 1
    ]
    return [*split, *(ExpertWay(cost=cost) for cost in spread)]


def predict(
    costs: Sequence[LayoutCost],
    num_tokens: Sequence[int],
    spread: Sequence[ExpertParallelCost] = (),
) -> dict[str, Any]:
    """Layouts with their thresholds, steps of ``num_tokens`` tokens, loads with the best way.

    ``spread``: the same numbers of ranks as replicas, with the experts spread over them.
    """
    by_gpus: dict[int, list[LayoutCost]] = {}
    for cost in costs:
        by_gpus.setdefault(cost.layout.world_size, []).append(cost)
    return {
        "layouts": [_layout(cost) for cost in costs],
        "expert_parallel": [cost.about() for cost in spread],
        "steps": [
            {**_about(way), "kind": kind, "num_tokens": size, **_milliseconds(way.step(kind, size))}
            for way in ways(costs, spread)
            for kind in KINDS
            for size in num_tokens
        ],
        "loads": [
            _load(load, group, [cost for cost in spread if cost.num_ranks == gpus])
            for gpus, group in by_gpus.items()
            for load in loads(group[0].max_tokens)
        ],
    }


def _about(way: AnyWay) -> dict[str, Any]:
    layout = way.cost.layout
    gpus = way.cost.num_ranks if isinstance(way, ExpertWay) else layout.world_size
    return {"gpus": gpus, "way": way.name, "sp": layout.sp, "tp": layout.tp}


def _milliseconds(step: StepTime) -> dict[str, float]:
    return {"ms": step.total * 1e3, "communication_ms": step.communication * 1e3}


def _layout(cost: LayoutCost) -> dict[str, Any]:
    """What follows from the layout alone. Bytes are what each rank sends, per layer and token."""
    layout, config = cost.layout, cost.config
    size = 64 * layout.sp  # a multiple of SP, so that there is no padding
    moved = {
        model: sum(
            each.moved_bytes
            for each in layer_collectives(config, layout, model, size, cost.itemsize)
        )
        for model in MODELS
    }
    weights = {model: rank_weights(config, layout, model).total * cost.itemsize for model in MODELS}
    return {
        "gpus": layout.world_size,
        "sp": layout.sp,
        "tp": layout.tp,
        "weight_bytes": weights if layout.sp > 1 else {"base": weights["base"], "shift": 0},
        "layer_bytes_per_token": {model: moved[model] / size for model in MODELS},
        "threshold": cost.threshold,
        "threshold_of": dict(cost.thresholds),
        "ms_at_threshold": {
            kind: cost.step("shift", kind, cost.threshold).total * 1e3
            for kind in KINDS
            if cost.threshold
        },
    }


def _load(
    load: Load, costs: Sequence[LayoutCost], spread: Sequence[ExpertParallelCost]
) -> dict[str, Any]:
    rows = []
    for way in ways(costs, spread):
        seconds = load.seconds(way.seconds, costs[0].max_tokens)
        rows.append(
            {
                **_about(way),
                "threshold": way.threshold,
                "seconds": seconds,
                "tokens_per_s": load.num_tokens / seconds,
            }
        )
    # Ties go to the first way: those without the shift model, which takes memory, come first.
    return {
        "load": load.name,
        "gpus": costs[0].layout.world_size,
        "num_reqs": load.num_reqs,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "best": min(rows, key=lambda row: row["seconds"]),
        "ways": rows,
    }
