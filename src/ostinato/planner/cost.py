"""What a step costs when a model runs on several ranks, and what follows from it. Arithmetic only.

Pure functions of a model's dimensions, a layout and a few numbers about the machine; nothing is
measured and nothing runs here. What a rank computes takes a time that comes from a ``Compute``
(``compute.py``: a roofline, or a measurement), what the ranks tell each other one that comes
from ``communication.py``. The two are added: nothing overlaps, as nothing does in the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from ostinato.errors import ConfigError
from ostinato.parallel.layout import ParallelLayout
from ostinato.planner.communication import (
    Interconnect,
    Model,
    layer_collectives,
    outer_collectives,
)

if TYPE_CHECKING:
    from ostinato.models.native.decoder_config import DecoderConfig

# The kinds of batches whose costs differ most: one token of each of many requests, and many tokens
# of one request.
Kind: TypeAlias = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")


class Compute(Protocol):
    """How long a rank computes in one step, the head included and all communication excluded."""

    def seconds(self, model: Model, layout: ParallelLayout, kind: Kind, num_tokens: int) -> float:
        """Of a batch of ``num_tokens`` tokens before padding."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """Step times under one layout, for batches of 1 to ``max_tokens`` tokens.

    Raises where the model's heads cannot be dealt out to the layout.
    """

    config: DecoderConfig
    layout: ParallelLayout
    itemsize: int
    compute: Compute
    interconnect: Interconnect
    max_tokens: int

    def __post_init__(self) -> None:
        check_layout(self.config, self.layout)

    def step(self, model: Model, kind: Kind, num_tokens: int) -> StepTime:
        num_reqs = num_tokens if kind == "decode" else 1
        about = (self.config, self.layout, model, num_tokens)
        before, after = outer_collectives(*about, num_reqs, self.itemsize)
        layer = self.interconnect.seconds(layer_collectives(*about, self.itemsize))
        outside = self.interconnect.seconds([*before, *after])
        return StepTime(
            compute=self.compute.seconds(model, self.layout, kind, num_tokens),
            communication=outside + self.config.num_layers * layer,
        )

    def shifted(self, kind: Kind, num_tokens: int, threshold: int) -> StepTime:
        """By the shift model up to ``threshold`` tokens, by the base model above."""
        return self.step("shift" if num_tokens <= threshold else "base", kind, num_tokens)

    @cached_property
    def thresholds(self) -> dict[Kind, int]:
        """The best threshold if all batches were of one kind."""
        return {kind: best_threshold(*self._curves[kind]) for kind in KINDS}

    @cached_property
    def threshold(self) -> int:
        """The best one for both kinds, which count the same; 0: the shift model never pays."""
        decode, prefill = (self._curves[kind] for kind in KINDS)
        base, shift = (
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(decode, prefill, strict=True)
        )
        return best_threshold(base, shift)

    @cached_property
    def _curves(self) -> dict[Kind, tuple[list[float], list[float]]]:
        """Seconds of base and shift for every number of tokens from 1."""
        if self.layout.sp == 1:  # both are one model, and there is nothing to choose
            return {kind: ([], []) for kind in KINDS}
        sizes = range(1, self.max_tokens + 1)
        return {
            kind: (
                [self.step("base", kind, num_tokens).total for num_tokens in sizes],
                [self.step("shift", kind, num_tokens).total for num_tokens in sizes],
            )
            for kind in KINDS
        }


def best_threshold(base: Sequence[float], shift: Sequence[float]) -> int:
    """Where to change from shift to base, given seconds for 1, 2, 3, ... tokens.

    The threshold with the least sum over all of these batches: where the curves cross, if they
    cross once. Of equal ones the smallest, since a model that is no faster is not worth its memory.
    """
    lost = accumulate((s - b for b, s in zip(base, shift, strict=True)), initial=0.0)
    return min(enumerate(lost), key=lambda pair: pair[1])[0]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that come at once: their prompts are run, and then all of them decode together."""

    name: str
    num_reqs: int
    prompt_tokens: int
    output_tokens: int

    def seconds(self, step: Callable[[Kind, int], float], max_tokens: int) -> float:
        """Until the last token. Prompts fill steps of ``max_tokens``; each prompt's last step gives
        the first token, and every step after that one of each request.
        """
        if self.num_reqs > max_tokens:
            raise ConfigError(
                f"the {self.name} load has {self.num_reqs} requests, which decode together, but "
                f"steps have at most {max_tokens} tokens; allow for more tokens or fewer requests"
            )
        full, rest = divmod(self.num_reqs * self.prompt_tokens, max_tokens)
        total = full * step("prefill", max_tokens) if full else 0.0
        if rest:
            total += step("prefill", rest)
        return total + (self.output_tokens - 1) * step("decode", self.num_reqs)

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * (self.prompt_tokens + self.output_tokens)


def check_layout(config: DecoderConfig, layout: ParallelLayout) -> None:
    """Raise unless heads and feed-forward layers can be split over all ranks of the layout."""
    layout.heads(config.num_heads, config.num_kv_heads)
    if config.intermediate_size % layout.world_size:
        raise ConfigError(
            f"feed-forward layers of width {config.intermediate_size} cannot be split evenly over "
            f"{layout.world_size} ranks; choose a number of ranks that divides "
            f"{config.intermediate_size}"
        )


def layouts_of(config: DecoderConfig, num_ranks: int) -> list[ParallelLayout]:
    """All layouts of so many ranks, most sequence parallel first; raises if the model has none."""
    found = [
        ParallelLayout(sp, num_ranks // sp) for sp in range(num_ranks, 0, -1) if num_ranks % sp == 0
    ]
    for layout in found:
        check_layout(config, layout)
    return found


def default_layouts(config: DecoderConfig) -> list[ParallelLayout]:
    """All layouts of 2 to 8 ranks that the model can run on."""
    found: list[ParallelLayout] = []
    for num_ranks in range(2, 9):
        try:
            found += layouts_of(config, num_ranks)
        except ConfigError:
            continue
    if not found:
        raise ConfigError(
            f"the model cannot be split over 2 to 8 ranks: it has {config.num_heads} heads, "
            f"{config.num_kv_heads} KV heads and feed-forward layers of width "
            f"{config.intermediate_size}; name a layout"
        )
    return found
