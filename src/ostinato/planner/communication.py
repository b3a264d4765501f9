"""The collectives of a sharded decoder's step, and how long they take.

The list of collectives is derived from the dimensions; a test compares it with the calls that the
decoder makes. An all-reduce of n ranks moves 2 (n - 1) / n of its bytes, an all-to-all (n - 1) / n,
an all-gather all parts but the rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ostinato.errors import ConfigError
from ostinato.parallel.layout import ParallelLayout, vocabulary

if TYPE_CHECKING:
    from ostinato.models.native.config.decoder_config import DecoderConfig

Model: TypeAlias = Literal["base", "shift"]  # the two models of a layout
MODELS: tuple[Model, ...] = ("base", "shift")


@dataclass(frozen=True)
class Collective:
    """One collective of ``num_ranks`` ranks; ``num_bytes`` is the size of one rank's argument."""

    name: Literal["all_reduce", "all_gather", "all_to_all"]
    num_ranks: int
    num_bytes: int

    @property
    def moved_bytes(self) -> float:
        """The bytes that each rank sends, and receives: the minimum for any algorithm on
        point-to-point links.
        """
        others = self.num_ranks - 1
        if self.name == "all_gather":
            return float(others * self.num_bytes)
        passes = 2 if self.name == "all_reduce" else 1
        return passes * others / self.num_ranks * self.num_bytes


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """``bandwidth``: bytes per second per GPU in one direction. ``latency``: seconds of a
    collective that moves almost nothing.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        check_number("the bandwidth between GPUs", self.bandwidth, above_zero=True)
        check_number("the latency of a collective", self.latency)

    def seconds(self, collectives: Iterable[Collective]) -> float:
        """The time of all collectives in sequence. A group of one rank takes none."""
        return sum(
            self.latency + each.moved_bytes / self.bandwidth
            for each in collectives
            if each.num_ranks > 1
        )


def head_counts(config: DecoderConfig, layout: ParallelLayout, model: Model) -> tuple[int, int]:
    """Query and KV heads of one rank's shard, for a layout that the model can run on.

    ``layout.heads`` says which ones. Attention always runs on the shift model's heads.
    """
    ranks = layout.world_size
    own = config.num_heads // ranks, max(1, config.num_kv_heads // ranks)
    return own if model == "shift" else (layout.sp * own[0], layout.sp * own[1])


def layer_collectives(
    config: DecoderConfig, layout: ParallelLayout, model: Model, num_tokens: int, itemsize: int
) -> list[Collective]:
    """The collectives of one layer, in order. ``num_tokens``: the whole batch, before padding."""
    hidden = config.hidden_size * itemsize
    # A norm over all heads adds up the squares of queries and keys, in float32.
    squares = 2 * 4 if config.qk_norm == "full" else 0
    if model == "shift":
        norm = Collective("all_reduce", layout.world_size, num_tokens * squares)
        total = Collective("all_reduce", layout.world_size, num_tokens * hidden)
        return _real([*[norm] * bool(squares), total, total])
    share = layout.padded_tokens(num_tokens) // layout.sp
    norm = Collective("all_reduce", layout.tp, share * squares)
    total = Collective("all_reduce", layout.tp, share * hidden)
    exchanges = _sequence_collectives(config, layout, share * itemsize)
    return _real([*[norm] * bool(squares), *exchanges, total, total])


def _sequence_collectives(
    config: DecoderConfig, layout: ParallelLayout, column: int
) -> list[Collective]:
    """Around the base model's attention. ``column``: the bytes of one for a rank's tokens."""
    (num_heads, num_kv_heads), latent = head_counts(config, layout, "base"), config.latent
    if latent is None:
        columns = (num_heads + 2 * num_kv_heads) * config.head_dim, num_heads * config.head_dim
    else:
        columns = num_heads * latent.query_dim, num_heads * latent.v_head_dim
    before, after = (Collective("all_to_all", layout.sp, each * column) for each in columns)
    if latent is None:
        return [before, after]
    return [before, Collective("all_gather", layout.sp, latent.row_dim * column), after]


def outer_collectives(
    config: DecoderConfig,
    layout: ParallelLayout,
    model: Model,
    num_tokens: int,
    num_reqs: int,
    itemsize: int,
) -> tuple[list[Collective], list[Collective]]:
    """Before the layers (the embedding) and after them (hidden states, logits of ``num_reqs``).

    Both models use the base model's head.
    """
    hidden = config.hidden_size * itemsize
    vocab = len(vocabulary(config.vocab_size, layout.tp, 0))
    logits = Collective("all_gather", layout.tp, num_reqs * vocab * itemsize)
    if model == "shift":
        embedding = Collective("all_reduce", layout.world_size, num_tokens * hidden)
        return _real([embedding]), _real([logits])
    share = layout.padded_tokens(num_tokens) // layout.sp
    embedding = Collective("all_reduce", layout.tp, share * hidden)
    return _real([embedding]), _real([Collective("all_gather", layout.sp, share * hidden), logits])


def _real(listed: Iterable[Collective]) -> list[Collective]:
    return [each for each in listed if each.num_ranks > 1]


def check_number(name: str, value: float, *, above_zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise ConfigError(f"{name} must be a number {least}, got {value}")
