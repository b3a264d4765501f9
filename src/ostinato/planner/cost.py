"""Predicts the cost of a step when a model runs on several ranks. Arithmetic only.

Pure functions of a model's dimensions, a layout and a few numbers about the machine; nothing is
measured or run here. A ``Compute`` supplies each rank's compute time (``compute.py``: a roofline,
or a measurement), ``communication.py`` the communication time. The two are added,
because the decoder does not overlap them.
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
    from ostinato.models.native.config.decoder_config import DecoderConfig

# The kinds of batches whose costs differ most: one token from each of many requests, and many
# tokens of one request.
Kind: TypeAlias = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")


class Compute(Protocol):
    """How long a rank computes in one step, including the head, excluding communication."""

    def seconds(self, model: Model, layout: ParallelLayout, kind: Kind, num_tokens: int) -> float:
        """Time for a batch of ``num_tokens`` tokens before padding."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """Step times under one layout, for batches of 1 to ``max_tokens`` tokens.

    Raises if the model's heads cannot be divided over the layout.
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
        """The shift model's time up to ``threshold`` tokens, the base model's above."""
        return self.step("shift" if num_tokens <= threshold else "base", kind, num_tokens)

    @cached_property
    def thresholds(self) -> dict[Kind, int]:
        """The best threshold for each kind, if all batches were of that kind."""
        return {kind: best_threshold(*self._curves[kind]) for kind in KINDS}

    @cached_property
    def threshold(self) -> int:
        """The best threshold for both kinds, weighted equally; 0 if shift never pays off."""
        decode, prefill = (self._curves[kind] for kind in KINDS)
        base, shift = (
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(decode, prefill, strict=True)
        )
        return best_threshold(base, shift)

    @cached_property
    def _curves(self) -> dict[Kind, tuple[list[float], list[float]]]:
        """Seconds of base and shift for every number of tokens from 1."""
        if self.layout.sp == 1:  # both are the same model
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
    """Where to switch from shift to base, given seconds for 1, 2, 3, ... tokens.

    The threshold with the smallest sum over these batches: the crossing point, if there is just
    one. Ties go to the smallest, since a model that is not faster is not worth its memory.
    """
    lost = accumulate((s - b for b, s in zip(base, shift, strict=True)), initial=0.0)
    return min(enumerate(lost), key=lambda pair: pair[1])[0]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that arrive at once: their prompts run first, then all of them decode together."""

    name: str
    num_reqs: int
    prompt_tokens: int
    output_tokens: int

    def seconds(self, step: Callable[[Kind, int], float], max_tokens: int) -> float:
        """Time until the last token. Prompts fill steps of ``max_tokens``; each prompt's last step
        produces the first token, and every later step one token per request.
        """
        if self.num_reqs > max_tokens:
            raise ConfigError(
                f"the {self.name} load decodes {self.num_reqs} requests together, but steps have "
                f"at most {max_tokens} tokens; allow more tokens or fewer requests"
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
    """Raise unless heads and feed-forward layers divide evenly over the layout's ranks."""
    layout.heads(config.num_heads, config.num_kv_heads)
    config.check_split(layout.world_size)


def layouts_of(config: DecoderConfig, num_ranks: int) -> list[ParallelLayout]:
    """All layouts of ``num_ranks`` ranks, most sequence parallel first; raises if there is none."""
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
