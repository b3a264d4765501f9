"""What is known about a request when it ends, and about the engine at any time: plain numbers."""

from __future__ import annotations

from contextvars import Context
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request that has ended, with all its sequences. Times are ``time.monotonic()``.

    ``context``: the context variables of the task that sent it, for observers that follow traces.

    ``scheduled``: when its first sequence was admitted to a step; ``first_token``: when its first
    token was known; None if it ended before. ``finish_reason``: of its first sequence.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    num_sequences: int
    arrived: float
    scheduled: float | None
    first_token: float | None
    ended: float
    finish_reason: str
    context: Context = field(repr=False, compare=False)

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def time_per_token(self) -> float | None:
        """Mean time of a token after the first of its sequence; None if there is none."""
        later = self.num_generated_tokens / self.num_sequences - 1
        if self.first_token is None or later <= 0:
            return None
        return (self.ended - self.first_token) / later


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts of an engine: what runs now, and totals since the start.

    Sequences: ``num_running``, ``num_waiting``, and ``num_preemptions`` that had to give up their
    blocks. ``kv_cache_usage``: the fraction of blocks that requests hold. ``prompt_tokens`` of
    requests that have begun to answer, and ``generation_tokens``. ``prefix_query_tokens`` were
    looked up in the prefix cache, and ``prefix_hit_tokens`` found. ``draft_runs``: steps with
    drafts, counted once for each of their requests; ``draft_tokens`` in them, of which
    ``accepted_tokens`` were right.

    ``replays``: steps through graphs, by mode; ``eager``: steps without, by reason.
    ``replayed_tokens`` and ``padding_tokens``: in those graphs, which take ``graph_bytes``.
    ``masked_steps``: with structured output, for which the host read all tokens at once.
    ``verified_steps``: graphs and steps that were compared with eager runs (``verify``);
    ``quarantined_graphs`` differed, and run eagerly. Of several replicas, graphs are those of the
    first, and all else is of all. A model that embeds or classifies has graphs only.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    draft_runs: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    replays: dict[str, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)
    replayed_tokens: int = 0
    padding_tokens: int = 0
    graph_bytes: int = 0
    masked_steps: int = 0
    verified_steps: int = 0
    quarantined_graphs: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a request in a step with drafts: the accepted ones, and one more."""
        return 1 + self.accepted_tokens / self.draft_runs if self.draft_runs else 0.0
