"""``ostinato plan graphs``: the best sizes for observed batches, against the default ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.errors import ConfigError
from ostinato.graphs.policy.choose_sizes import BatchKind, GraphLimits, choose_sizes
from ostinato.planner.graphs.observed import StepShapes
from ostinato.planner.graphs.step_costs import KindCosts, StepCosts, curve


def plan_graphs(shapes: StepShapes, costs: StepCosts, limits: GraphLimits) -> dict[str, Any]:
    """The sizes that minimise the time of all steps, and the gain over the measured ladder.

    Candidates are the observed numbers of tokens, and the sizes of the ladder.
    """
    num_steps = sum(counts.total() for counts in shapes.values())
    if not num_steps:
        raise ConfigError("no step was observed, so there is nothing to plan for")
    names = [name for name, counts in shapes.items() if counts]
    costs_of = {"decode": costs.decode, "mixed": costs.mixed}
    kinds = [_kind(name, shapes, costs_of[name], costs) for name in names]
    ladders = [tuple(size for size, _ in costs_of[name].replay) for name in names]
    chosen = choose_sizes(kinds, limits)
    planned, default, eager = (
        sum(kind.seconds(sizes) for kind, sizes in zip(kinds, choice, strict=True)) / num_steps
        for choice in (chosen, ladders, [()] * len(kinds))
    )
    return {
        "command": "ostinato plan graphs",
        "model": costs.model,
        "machine": costs.machine,
        "steps": num_steps,
        "planned": _described(names, kinds, chosen, planned),
        "default": _described(names, kinds, ladders, default),
        "eager_ms_per_step": eager * 1e3,
        "gain": 1 - planned / default,
    }


def as_flags(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Options of ``serve`` and ``generate`` that capture the planned ``sizes`` and no others.

    Where mixed batches alone have graphs, decode batches run through them too.
    """
    decode, mixed = (",".join(map(str, sizes.get(name, ()))) for name in ("decode", "mixed"))
    if decode and mixed:
        return [f"--sizes {decode}", f"--mixed-sizes {mixed}"]
    if decode:
        return ["--mode FULL_DECODE_ONLY", f"--sizes {decode}"]
    return ["--mode FULL", f"--sizes {mixed}"] if mixed else ["--mode NONE"]


def _kind(name: str, shapes: StepShapes, kind: KindCosts, costs: StepCosts) -> BatchKind:
    limit = costs.max_num_seqs if name == "decode" else costs.max_num_batched_tokens
    too_large = [size for size in shapes[name] if size > limit]
    if too_large:
        raise ConfigError(
            f"{name} steps of {max(too_large)} tokens were observed, but costs were measured for "
            f"at most {limit}; measure them with the limits of the engine that was observed"
        )
    ladder = [size for size, _ in kind.replay]
    # Between measured sizes the cost is interpolated; above the largest it is not known.
    observed = [size for size in shapes[name] if size <= ladder[-1]]
    return BatchKind(
        steps=shapes[name],
        sizes=[*ladder, *observed],
        replay=curve(kind.replay),
        eager=curve(kind.eager),
        graph_bytes=kind.graph_bytes,
        graph_seconds=kind.graph_seconds,
        pool_bytes=lambda size: int(size * costs.pool_bytes_per_token),
    )


def _described(
    names: list[str], kinds: list[BatchKind], sizes: list[tuple[int, ...]], seconds: float
) -> dict[str, Any]:
    pairs = list(zip(kinds, sizes, strict=True))
    pool = max((kind.pool_bytes(max(its)) for kind, its in pairs if its), default=0)
    return {
        "sizes": {name: list(its) for name, its in zip(names, sizes, strict=True)},
        "graphs": sum(map(len, sizes)),
        "bytes": pool + sum(kind.graph_bytes * len(its) for kind, its in pairs),
        "capture_seconds": sum(kind.graph_seconds * len(its) for kind, its in pairs),
        "ms_per_step": seconds * 1e3,
    }
