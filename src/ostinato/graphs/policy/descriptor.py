"""The input of dispatch, the key of a graph, and the output of dispatch.

A ``BatchShape`` describes the batch about to run. A ``BatchDescriptor`` is the key of a captured
graph. A ``Choice`` is the graph that runs the batch, or none, and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode


class BatchShape(NamedTuple):
    """One batch before padding. A tuple, because one is built for every step.

    ``num_tokens`` and ``num_reqs``: totals. ``max_query_len``: most tokens of one request.
    ``num_active_loras``: number of different adapters in use.

    ``attention_blocks_full`` is set when attention cannot be captured for this batch (for example,
    cascade attention), which rules out FULL graphs.

    ``has_prompts`` is set when a request is still in its prompt. Such a batch is mixed, even if its
    chunks happen to be as long as the queries of a decode batch. A request that computes only the
    last token of its prompt counts as decoding: it computes one token and samples the next.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    num_active_loras: int = 0
    attention_blocks_full: bool = False
    has_prompts: bool = False


@dataclass(frozen=True)
class BatchDescriptor:
    """The minimal description of a padded batch; the key of its graph.

    ``num_tokens``: padded. ``uniform``: only for uniform decode batches. ``num_active_loras``: the
    plan's number of adapters; ``has_lora``: whether it is above 0.

    PIECEWISE keys leave ``num_reqs`` None, since attention runs outside their graphs and any number
    of requests can use them. FULL keys set it. ``query_len`` is set only when decode graphs of
    several query lengths exist side by side.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    query_len: int | None = None
    # Cached: hashing six fields on every replay would cost more than the lookup.
    _hash: int = field(init=False, repr=False, compare=False)

    def describe(self) -> str:
        """The batch in words, such as "8 tokens of 8 requests, decode"."""
        requests = "" if self.num_reqs is None else f" of {_counted(self.num_reqs, 'request')}"
        decode = ", decode" if self.uniform else ""
        adapters = f", {_counted(self.num_active_loras, 'adapter')}" if self.has_lora else ""
        return f"{_counted(self.num_tokens, 'token')}{requests}{decode}{adapters}"

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_reqs", "query_len"):
            value = getattr(self, name)
            may_lack = value is None and name != "num_tokens"
            if not may_lack and (type(value) is not int or value < 1):
                raise ConfigError(f"BatchDescriptor.{name} must be a positive int, got {value!r}")
        if self.num_active_loras < 0 or self.has_lora != (self.num_active_loras > 0):
            raise ConfigError(
                f"BatchDescriptor has has_lora={self.has_lora} with num_active_loras="
                f"{self.num_active_loras}; has_lora is true exactly when adapters are active"
            )
        # Integers only: before Python 3.12 the hash of None differs between processes, and a key
        # sent to another rank includes its hash.
        key = (
            self.num_tokens,
            self.num_reqs or 0,
            self.uniform,
            self.num_active_loras,
            self.query_len or 0,
        )
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def eager(cls, num_tokens: int, num_active_loras: int = 0) -> BatchDescriptor:
        """The description of a batch without a graph."""
        has_lora = num_active_loras > 0
        return cls(num_tokens, has_lora=has_lora, num_active_loras=num_active_loras)


class Reason(Enum):
    """Why a batch runs the way it does. All but the first five mean that it runs eagerly."""

    UNIFORM_DECODE = "uniform decode batch with a captured graph"
    MIXED = "batch with a captured graph"
    FULL_BLOCKED = "attention cannot be captured for this batch, so its pieces are replayed"
    PIECES_ON_ANOTHER_RANK = "the ranks that step together have no full graph in common"
    MIXED_ON_ANOTHER_RANK = "the ranks that step together have no decode graph in common"
    MODE_NONE = "graph mode is NONE"
    MIXED_NOT_PLANNED = "the graph mode has graphs for uniform decode batches only"
    TOO_LARGE = "more tokens than the largest captured size"
    TOO_MANY_LORAS = "more active adapters than the plan has graphs for"
    ATTENTION = "attention cannot be captured for this batch and there are no piecewise graphs"
    NOT_CAPTURED = "the graph for this size is not captured yet"
    CAPTURE_FAILED = "the capture of this size failed and eager fallback was allowed"
    DISABLED = "the graph was disabled"
    UNVERIFIED = "the comparison of the graph with eager calls has no result yet"
    DIFFERS_FROM_EAGER = "the graph's result differs from eager, and eager fallback was allowed"
    QUARANTINED = "a shadow run found that the graph differs from eager (verify)"
    EAGER_ON_ANOTHER_RANK = "another rank of the same step runs its batch eagerly"
    NO_COMMON_SIZE = "no size that all ranks have graphs for fits the largest of their batches"

    @property
    def is_eager(self) -> bool:
        """Whether a batch with this reason runs without a graph."""
        return self not in (
            Reason.UNIFORM_DECODE,
            Reason.MIXED,
            Reason.FULL_BLOCKED,
            Reason.PIECES_ON_ANOTHER_RANK,
            Reason.MIXED_ON_ANOTHER_RANK,
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one batch runs: its ``mode``, its padded key (``descriptor``), and the ``reason``.

    Dispatch creates it once, before the input buffers are filled, and it travels with the batch;
    nothing downstream decides again. For an eager batch the descriptor holds its token count,
    padded only to the plan's ``token_multiple``, and its number of active adapters.

    ``uniform_decode``: the batch runs as a decode step, with the decode query length in every row,
    padding rows included. ``padded_num_reqs``: its number of rows; None: the number of requests.
    ``model``: the index of the model that runs it, if several share the batches (``Dispatcher``).
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: Reason
    uniform_decode: bool = False
    padded_num_reqs: int | None = None
    model: int = 0
    padded_num_tokens: int = field(init=False, repr=False, compare=False)  # read in every step

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_num_tokens", self.descriptor.num_tokens)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
