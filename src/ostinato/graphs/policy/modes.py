"""Graph modes, and how an attention backend limits them.

``CUDAGraphMode`` says which batches run through graphs and how. An attention backend declares its
``AttentionCGSupport``. ``resolve_mode`` combines the two once, at start-up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Literal

from ostinato.errors import ConfigError
from ostinato.quoting import shown

logger = logging.getLogger(__name__)


# What ``CUDAGraphMode.parse`` takes, in any case; editors and mypy know these two.
ModeName = Literal[
    "NONE",
    "PIECEWISE",
    "FULL",
    "FULL_DECODE_ONLY",
    "FULL_AND_PIECEWISE",
    "FULL_AND_FULL",
    "none",
    "piecewise",
    "full",
    "full_decode_only",
    "full_and_piecewise",
    "full_and_full",
]


class CUDAGraphMode(Enum):
    """Which graphs a model runs through.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are also *runtime* modes: one batch runs under exactly one
    of them. The others are pairs: one runtime mode for uniform decode batches, another for mixed
    batches. ``FULL_AND_FULL`` is not ``FULL``, which has one kind of graph for all batches.
    ``rank`` orders runtime modes by how much of the step is captured, so that ranks can agree on
    the lowest.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"
    FULL_AND_FULL = "full_and_full"

    @classmethod
    def parse(cls, value: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode that ``value`` names, ignoring case. An unknown name raises and lists them."""
        if isinstance(value, cls):
            return value
        known = ", ".join(mode.name for mode in cls)
        if not isinstance(value, str):
            raise ConfigError(
                f"graph mode must be text or CUDAGraphMode, got {shown(value)}; choose one of "
                f"{known}"
            )
        try:
            return cls(value.strip().lower())
        except ValueError:
            raise ConfigError(f"unknown graph mode {shown(value)}; choose one of {known}") from None

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode.FULL if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of all other batches."""
        return _MIXED_HALVES.get(self, self)

    def separate_routine(self) -> bool:
        """Whether decode batches have graphs separate from those of mixed batches."""
        return self in _MIXED_HALVES

    @classmethod
    def valid_runtime_modes(cls) -> frozenset[CUDAGraphMode]:
        """The modes that a single batch can run under."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})

    def is_valid_runtime_mode(self) -> bool:
        """Whether one batch can run under this mode: it is not a pair."""
        return not self.separate_routine()

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether any batch can run under the runtime mode ``mode``."""
        if mode.separate_routine():
            raise ConfigError(
                f"has_mode takes a runtime mode, and {mode.name} is a pair of them; ask for its "
                "decode_mode() or mixed_mode()"
            )
        return mode in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Whether any batch runs as one graph."""
        return self.has_mode(CUDAGraphMode.FULL)

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether any batch runs as graphs around attention."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def requires_piecewise_compilation(self) -> bool:
        """Whether the model must be split at attention, by torch.compile or at run time."""
        return self.has_piecewise_cudagraphs()

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The runtime mode that captures the most of a step."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: mode.rank)

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name

    @property
    def rank(self) -> int:
        """Order of runtime modes: NONE < PIECEWISE < FULL."""
        if not self.is_valid_runtime_mode():
            raise ConfigError(
                f"{self.name} is a pair of modes and has no rank; take its decode_mode() or "
                "mixed_mode()"
            )
        return (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL).index(self)


# Of the pairs; the other half of each is FULL.
_MIXED_HALVES = {
    CUDAGraphMode.FULL_DECODE_ONLY: CUDAGraphMode.NONE,
    CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_AND_FULL: CUDAGraphMode.FULL,
}


class AttentionCGSupport(IntEnum):
    """Which batches an attention backend can be captured for, from least to most."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    @classmethod
    def of(cls, value: object) -> AttentionCGSupport:
        """``value`` as a member, if it is one, or the number of one."""
        try:
            return cls(value)  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(
                f"attention support must be an AttentionCGSupport, got {value!r}; choose one of "
                f"{', '.join(cls.__members__)}"
            ) from None

    @classmethod
    def weakest(cls, supports: Iterable[AttentionCGSupport]) -> AttentionCGSupport:
        """The least of ``supports``: what a model with several attention backends has."""
        return min(supports, default=cls.ALWAYS)


@dataclass(frozen=True, kw_only=True)
class ResolvedMode:
    """The ``mode`` in force, the one ``requested``, and the ``reason`` why they differ, or None."""

    mode: CUDAGraphMode
    requested: CUDAGraphMode
    reason: str | None = None


def resolve_mode(
    requested: CUDAGraphMode | ModeName,
    support: AttentionCGSupport,
    *,
    decode_query_len: int = 1,
    piecewise_available: bool,
    part: str = "attention",
) -> ResolvedMode:
    """Lower ``requested`` to what the attention backend supports, and log why if it changes.

    ``support``: of the weakest backend in the model. ``decode_query_len``: tokens of each request
    in a decode batch. ``piecewise_available``: the model can be split, or broken, at attention.
    ``part``: what in the model has this support.
    """
    requested, support = CUDAGraphMode.parse(requested), AttentionCGSupport.of(support)
    if type(decode_query_len) is not int or decode_query_len < 1:
        raise ConfigError(f"decode_query_len must be a positive integer, got {decode_query_len!r}")
    mode, why = _allowed(requested, support, decode_query_len, piecewise_available, part)
    if mode is requested:
        return ResolvedMode(mode=mode, requested=requested)
    split = "can" if piecewise_available else "cannot"
    reason = f"{why}, and the model {split} be split at {part}"
    logger.warning("graph mode %s becomes %s: %s", requested.name, mode.name, reason)
    return ResolvedMode(mode=mode, requested=requested, reason=reason)


def _allowed(
    requested: CUDAGraphMode,
    support: AttentionCGSupport,
    decode_query_len: int,
    piecewise_available: bool,
    part: str,
) -> tuple[CUDAGraphMode, str]:
    if support is AttentionCGSupport.ALWAYS or not requested.has_mode(CUDAGraphMode.FULL):
        return requested, ""
    without_full = CUDAGraphMode.PIECEWISE if piecewise_available else CUDAGraphMode.NONE
    if support is AttentionCGSupport.NEVER:
        if requested is CUDAGraphMode.FULL:
            raise ConfigError(
                "graph mode FULL needs attention that can be captured, but the attention backend "
                "declares NEVER; use PIECEWISE or NONE, or another attention backend"
            )
        return without_full, "the attention backend can never be captured"
    if support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE and decode_query_len > 1:
        why = f"{part} is capturable for one token per request, not {decode_query_len}"
        return without_full, why
    if requested.mixed_mode() is not CUDAGraphMode.FULL:
        return requested, ""
    decode_only = (
        CUDAGraphMode.FULL_AND_PIECEWISE if piecewise_available else CUDAGraphMode.FULL_DECODE_ONLY
    )
    return decode_only, f"{part} is capturable for uniform decode batches only"
