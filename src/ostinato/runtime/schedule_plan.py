"""What the scheduler decided for one step, and what came of it: values that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.graphs.descriptor import BatchShape
from ostinato.runtime.request import Request


@dataclass(slots=True)  # many are built in every step, and these are the cheapest to build
class ScheduledRequest:
    """One request's part of a step: its tokens ``start`` to ``start + num_tokens`` are computed.

    ``new_blocks`` were put into its block table in this step, at index ``first_new_block``.
    ``is_new``: it was admitted in this step, and its row ``slot`` must be written whole.
    ``samples``: no token is left after these, so the step gives it a new one.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    new_blocks: Sequence[int]
    first_new_block: int
    is_new: bool
    samples: bool


@dataclass(slots=True)
class TokenEvent:
    """A request got a token. ``index`` is its row among those of the plan that sampled."""

    request: Request
    token_id: int
    index: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """One step. Requests with a single token that samples stand first, then all others.

    ``preempted`` requests lost their rows and blocks; none of them is in ``requests``.
    """

    requests: list[ScheduledRequest]
    num_tokens: int
    num_samples: int
    max_query_len: int
    preempted: list[Request]

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.num_tokens, len(self.requests), self.max_query_len)
