"""The values that describe one step: what the scheduler decided, and the resulting tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.scheduling.request import Request, RequestStatus, num_active_loras

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)  # not frozen: many are built in every step, and this is the cheapest
class ScheduledRequest:
    """One request's part of a step: its tokens ``start`` to ``start + num_tokens`` are computed.

    ``new_blocks`` were added to its block table in this step, at index ``first_new_block``.
    ``is_new``: it was admitted in this step, so its whole row ``req_index`` must be written.
    ``samples``: these are its last tokens, so the step samples a new one. With drafts, ``start`` is
    the least that it can be: steps in flight may accept some.
    ``admission`` is its number of preemptions when scheduled: if that has grown when the step's
    result arrives, the request no longer holds the blocks that the step wrote to.
    """

    request: Request
    req_index: int
    start: int
    num_tokens: int
    new_blocks: Sequence[int]
    first_new_block: int
    is_new: bool
    samples: bool
    admission: int

    @property
    def max_seq_len(self) -> int:
        """Most tokens of the request in the cache after this step.

        Its own drafts, and those of steps in flight, may all be accepted.
        """
        return self.start + self.num_tokens + self.request.num_pending_drafts

    @property
    def holds_its_blocks(self) -> bool:
        """Whether the request still has the blocks that this step wrote to."""
        request = self.request
        return request.status is RequestStatus.RUNNING and request.num_preemptions == self.admission


@dataclass(slots=True)
class TokenEvent:
    """A request got a token, or several by accepted drafts; ``token_id`` is the last.

    ``index`` is the position of the first among the plan's sampled tokens, accepted or not.
    """

    request: Request
    token_id: int
    index: int
    finished: bool

    @property
    def is_reported(self) -> bool:
        """Whether the request's output changes now: at its end, or with every token."""
        return self.finished or self.request.watched


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """One step. Requests that sample after a single token come first, then all others.

    ``preempted`` requests lost their rows and blocks; none of them is in ``requests``. With
    ``num_drafts``, every request computes its last token and as many drafts.
    """

    requests: list[ScheduledRequest]
    num_tokens: int
    num_samples: int
    max_query_len: int
    preempted: list[Request]
    num_drafts: int = 0

    @classmethod
    def of(
        cls, rows: list[ScheduledRequest], num_tokens: int, preempted: list[Request]
    ) -> SchedulePlan:
        """Build the plan of these rows, which are in order of arrival."""
        decodes = [row for row in rows if row.num_tokens == 1 and row.samples]
        others: list[ScheduledRequest] = []
        if len(decodes) < len(rows):
            others = [row for row in rows if row.num_tokens > 1 or not row.samples]
        return cls(
            requests=decodes + others,
            num_tokens=num_tokens,
            num_samples=len(decodes) + sum(row.samples for row in others),
            max_query_len=max((row.num_tokens for row in others), default=min(len(decodes), 1)),
            preempted=preempted,
        )

    @classmethod
    def with_drafts(cls, rows: list[ScheduledRequest], num_drafts: int) -> SchedulePlan:
        """Build the plan of these rows, which all have the same number of drafts."""
        return cls(
            requests=rows,
            num_tokens=len(rows) * (1 + num_drafts),
            num_samples=len(rows) * (2 + num_drafts),  # and how many of them are accepted
            max_query_len=1 + num_drafts,
            preempted=[],
            num_drafts=num_drafts,
        )

    @property
    def shape(self) -> BatchShape:
        # A request that does not decode is in its prompt.
        return BatchShape(
            self.num_tokens,
            len(self.requests),
            self.max_query_len,
            num_active_loras(self.lora_slots),
            has_prompts=not self.is_decode,
        )

    @property
    def lora_slots(self) -> list[int]:
        """The adapters' slots of the requests, in their order."""
        return [item.request.lora_slot for item in self.requests]

    @cached_property
    def req_indices(self) -> list[int]:
        """The rows of the requests, in their order."""
        return [item.req_index for item in self.requests]

    @property
    def is_decode(self) -> bool:
        """Whether every request computes its last token, and drafts perhaps, and gets the next."""
        if self.num_drafts:
            return True
        return self.max_query_len == 1 and self.num_samples == len(self.requests)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """A decode step of the same requests as the previous step, in the same order.

    This is the plan of the steady state, built without a loop over the requests. All fields except
    the new blocks and ``step`` are the same objects from step to step: ``starts`` are the positions
    that the first step computes, and ``step`` counts the steps since.
    """

    num_tokens: int  # one per member
    shape: BatchShape
    members: list[Request]
    req_indices: IntArray
    starts: IntArray
    new_blocks: Sequence[tuple[int, int, int]]  # position in members, index in its table, block
    step: int = 0

    max_query_len = 1
    num_drafts = 0
    is_decode = True

    @property
    def num_samples(self) -> int:
        return self.num_tokens

    @property
    def preempted(self) -> list[Request]:
        return []

    @property
    def lora_slots(self) -> list[int]:
        """The adapters' slots of the requests, in their order."""
        return [request.lora_slot for request in self.members]

    @cached_property
    def requests(self) -> list[ScheduledRequest]:
        """One row per request, for callers that need each."""
        grown: dict[int, Any] = {position: rest for position, *rest in self.new_blocks}
        starts = (self.starts + self.step).tolist()
        rows = []
        for position, (request, row, start) in enumerate(
            zip(self.members, self.req_indices.tolist(), starts, strict=True)
        ):
            index, *blocks = grown.get(position, (0,))
            rows.append(
                ScheduledRequest(
                    request, row, start, 1, blocks, index, False, True, request.num_preemptions
                )
            )
        return rows


StepPlan: TypeAlias = SchedulePlan | DecodePlan
