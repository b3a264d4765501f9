"""A rank's compute time in a step, excluding communication: from a roofline or a measurement.

Both implement ``Compute`` of ``cost.py``. The roofline is a lower bound that needs no GPU; a
measurement is a result file of ``ostinato bench parallel``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ostinato.attention.latent_expansion import gpu_rule
from ostinato.errors import ConfigError
from ostinato.parallel.layout import ParallelLayout, vocabulary
from ostinato.planner.communication import MODELS, Model, check_number, head_counts
from ostinato.planner.cost import KINDS, Kind
from ostinato.planner.weights import (
    expert_weights,
    experts_touched,
    num_mixtures,
    rank_weights,
    replica_weights,
)

if TYPE_CHECKING:
    from ostinato.models.native.config.decoder_config import DecoderConfig
    from ostinato.models.native.config.latent_config import LatentConfig


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Each part of a step takes the longer of its reads and its arithmetic.

    The parts: the GEMMs of all layers, those of experts, attention, and the head. ``bandwidth``:
    bytes per second of the GPU's memory. ``flops``: operations per second. ``context``: keys that a
    decoded token attends to. Activations, small kernels and launches cost nothing, so real steps
    take longer. Experts are chosen evenly, and read if a token chooses them (``weights.py``).
    """

    config: DecoderConfig
    itemsize: int
    bandwidth: float
    flops: float
    context: int

    def __post_init__(self) -> None:
        check_number("the memory bandwidth", self.bandwidth, above_zero=True)
        check_number("the peak FLOP rate", self.flops, above_zero=True)
        if self.context < 1:
            raise ConfigError(
                f"context must be at least 1, got {self.context}: a token attends to itself"
            )

    def seconds(self, model: Model, layout: ParallelLayout, kind: Kind, num_tokens: int) -> float:
        config = self.config
        share = layout.padded_tokens(num_tokens) // layout.sp if model == "base" else num_tokens
        layers = rank_weights(config, layout, model).layers
        parts = layout.tp if model == "base" else layout.world_size
        return (
            self._longer(layers, 2 * layers * share)
            + self._experts(share, parts=parts)
            + self._attention(kind, num_tokens, head_counts(config, layout, "shift"))
            + self._head(kind, num_tokens, layout.tp)
        )

    def spreads_experts_over(self, num_ranks: int) -> bool:
        experts = self.config.experts
        return experts is not None and experts.num_experts % num_ranks == 0

    def expert_parallel_seconds(self, num_ranks: int, kind: Kind, num_tokens: int) -> float:
        """Of a rank with a whole replica but for its share of the experts.

        It has its part of the batch's ``num_tokens``, and its experts all of them.
        """
        config, share = self.config, -(-num_tokens // num_ranks)
        layers = replica_weights(config, num_ranks).layers
        return (
            self._longer(layers, 2 * layers * share)
            + self._experts(num_tokens, num_spread=num_ranks)
            + self._attention(kind, share, (config.num_heads, config.num_kv_heads))
            + self._head(kind, share, 1)
        )

    def _experts(self, num_tokens: int, *, parts: int = 1, num_spread: int = 1) -> float:
        """Each expert is in ``parts``, or the experts are spread over ``num_spread`` ranks."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        each = num_mixtures(self.config) * expert_weights(self.config, parts) / num_spread
        num_pairs = num_tokens * experts.options.top_k
        return self._longer(each * experts_touched(experts, num_tokens), 2 * each * num_pairs)

    def _attention(self, kind: Kind, num_tokens: int, heads: tuple[int, int]) -> float:
        # Elements of a key and its value; operations of a query and a key, and of a key.
        row, score, expand = 2 * heads[1] * self.config.head_dim, 4 * self.config.head_dim, 0
        if self.config.latent is not None:  # one row for all heads
            row = self.config.latent.row_dim
            score, expand = _latent_operations(self.config.latent, kind, num_tokens)
        read, computed = 0, 0
        for window, num_layers in self._windows.items():
            keys, pairs = _attended(kind, num_tokens, self.context, window)
            read += num_layers * keys * row
            computed += num_layers * heads[0] * (pairs * score + keys * expand)
        return self._longer(read, computed)

    def _head(self, kind: Kind, num_tokens: int, parts: int) -> float:
        num_reqs = num_tokens if kind == "decode" else 1
        head = len(vocabulary(self.config.vocab_size, parts, 0)) * self.config.hidden_size
        return self._longer(head, 2 * head * num_reqs)

    @cached_property
    def _windows(self) -> Counter[int | None]:
        """The number of layers with each window."""
        return Counter(self.config.windows)

    def _longer(self, elements: float, operations: float) -> float:
        return max(elements * self.itemsize / self.bandwidth, operations / self.flops)


def _latent_operations(latent: LatentConfig, kind: Kind, num_tokens: int) -> tuple[int, int]:
    """Of a query and a key, and of a key, for each head; as ``latent_expansion`` chooses."""
    rank, rope, value = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.v_head_dim
    rule = gpu_rule(rank, latent.query_dim, value, rope)
    if kind == "decode" or rule is None or num_tokens < rule.least_tokens:
        return 2 * (2 * rank + rope), 0
    return 2 * (latent.query_dim + value), 2 * rank * (latent.qk_nope_head_dim + value)


def _attended(kind: Kind, num_tokens: int, context: int, window: int | None) -> tuple[int, int]:
    """Keys that one layer reads, and query-key pairs, over all requests."""
    if kind == "decode":
        keys = num_tokens * min(context, window or context)
        return keys, keys
    limit = min(num_tokens, window or num_tokens)  # the first tokens attend to fewer
    return num_tokens, limit * (limit + 1) // 2 + (num_tokens - limit) * limit


class Measured:
    """Times from a result of ``ostinato bench parallel``, interpolated linearly.

    Below the smallest measured size a step takes as long as that one; above the largest it raises.
    """

    def __init__(self, result: Any, name: str) -> None:
        """``name`` says in errors where the result comes from."""
        try:
            self.model = str(result["model"])
            self.dtype = str(result["dtype"])
            self.context = int(result["context"])
            self._points = _points(result["rows"])
            self._spread = _spread_points(result.get("expert_parallel", []))
            self.machine = dict(result.get("machine", {}))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            raise ConfigError(f"{name} is not a result of `ostinato bench parallel`") from None
        if not self._points:
            raise ConfigError(f"{name} has no measurements")
        self._name = name

    @cached_property
    def layouts(self) -> list[ParallelLayout]:
        return list(dict.fromkeys(layout for layout, _, _ in self._points))

    @property
    def max_tokens(self) -> int:
        """The largest batch that was measured for all layouts, models and kinds."""
        return min(max(points) for points in self._points.values())

    @property
    def num_tokens(self) -> list[int]:
        """The sizes that were measured for all of them."""
        return sorted(set.intersection(*(set(points) for points in self._points.values())))

    def seconds(self, model: Model, layout: ParallelLayout, kind: Kind, num_tokens: int) -> float:
        points = self._points.get((layout, kind, model))
        if points is None:
            measured = ", ".join(f"{each.sp}x{each.tp}" for each in self.layouts)
            raise ConfigError(
                f"{self._name} has no {kind} times of the {model} model for the layout "
                f"{layout.sp}x{layout.tp}; it has the layouts {measured}"
            )
        return self._between(points, num_tokens, f"the layout {layout.sp}x{layout.tp}")

    def expert_parallel_seconds(self, num_ranks: int, kind: Kind, num_tokens: int) -> float:
        """Time of a replica with its share of the experts; ``num_tokens`` of all replicas."""
        points = self._spread.get((num_ranks, kind))
        if points is None:
            raise ConfigError(
                f"{self._name} has no {kind} times of experts spread over {num_ranks} GPUs"
            )
        return self._between(points, num_tokens, f"experts over {num_ranks} GPUs")

    def spreads_experts_over(self, num_ranks: int) -> bool:
        """Whether replicas of this number were measured."""
        return all((num_ranks, kind) in self._spread for kind in KINDS)

    def _between(self, points: Mapping[int, float], num_tokens: int, what: str) -> float:
        sizes = sorted(points)
        if num_tokens > sizes[-1]:
            raise ConfigError(
                f"{self._name} ends at {sizes[-1]} tokens for {what}, but {num_tokens} tokens were "
                "requested: measure them, or lower --max-tokens"
            )
        after = bisect_left(sizes, num_tokens)
        right = sizes[after]
        if after == 0 or right == num_tokens:
            return points[right]
        left = sizes[after - 1]
        part = (num_tokens - left) / (right - left)
        return points[left] + part * (points[right] - points[left])


_Key = tuple[ParallelLayout, Kind, Model]


def _points(rows: Sequence[Mapping[str, Any]]) -> dict[_Key, dict[int, float]]:
    points: dict[_Key, dict[int, float]] = {}
    for row in rows:
        layout = ParallelLayout(row["sp"], row["tp"])
        kind = KINDS[KINDS.index(row["kind"])]
        for model in MODELS:
            seconds = _checked(row[f"{model}_ms"])
            points.setdefault((layout, kind, model), {})[int(row["num_tokens"])] = seconds
    return points


def _spread_points(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[int, Kind], dict[int, float]]:
    points: dict[tuple[int, Kind], dict[int, float]] = {}
    for row in rows:
        key = int(row["gpus"]), KINDS[KINDS.index(row["kind"])]
        points.setdefault(key, {})[int(row["num_tokens"])] = _checked(row["ms"])
    return points


def _checked(milliseconds: Any) -> float:
    seconds = float(milliseconds) / 1e3
    if not 0 < seconds < math.inf:
        raise ValueError(seconds)
    return seconds
