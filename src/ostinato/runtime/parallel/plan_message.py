"""Plans on their way from rank 0 to the others: who runs, in which blocks, with which parameters.

A step of the steady state says only what the step before does not: the blocks that were added. So
it fits, with room to spare, into the one small message that ``Channel`` sends for every step.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

from ostinato.errors import CollectiveError
from ostinato.runtime.request import Request
from ostinato.runtime.schedule_plan import (
    DecodePlan,
    IntArray,
    Plan,
    ScheduledRequest,
    SchedulePlan,
)


class Kind(IntEnum):
    """What a message is."""

    STEP = 1  # a plan, request by request
    DECODE = 2  # the first plan of a steady state
    DECODE_AGAIN = 3  # the next plan of the same
    RESULT = 4  # what a call on rank 0 returned or raised
    CLOSE = 5


Message: TypeAlias = tuple[Kind, IntArray]


class PlanEncoder:
    """On rank 0: plans to messages. Remembers which steady state the others know."""

    def __init__(self) -> None:
        self._slots: IntArray | None = None

    def encode(self, plan: Plan) -> Message:
        if not isinstance(plan, DecodePlan):
            self._slots = None
            return Kind.STEP, to_words(pickle.dumps(_fields(plan), pickle.HIGHEST_PROTOCOL))
        blocks = np.array(plan.new_blocks, dtype=np.int64).reshape(-1)
        if plan.slots is self._slots:
            return Kind.DECODE_AGAIN, blocks
        self._slots = plan.slots
        count = np.array([len(plan.slots)], dtype=np.int64)
        return Kind.DECODE, np.concatenate((count, plan.slots, plan.starts + plan.step, blocks))


class PlanDecoder:
    """On the other ranks: messages to plans that a runner cannot tell from rank 0's.

    What they say of a request is as much as a runner looks at; nothing of it is kept up to date.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by slot
        self._last: DecodePlan | None = None

    def decode(self, kind: Kind, words: IntArray) -> Plan:
        if kind is Kind.STEP:
            self._last = None
            return self._step(pickle.loads(to_bytes(words)))
        if kind is Kind.DECODE:
            count = int(words[0])
            slots, starts = words[1 : count + 1].copy(), words[count + 1 : 2 * count + 1].copy()
            blocks = words[2 * count + 1 :]
            members = [self._requests[slot] for slot in slots.tolist()]
        elif self._last is None:
            raise CollectiveError("a plan refers to one before it that did not arrive")
        else:
            members, slots, starts = self._last.members, self._last.slots, self._last.starts + 1
            blocks = words
        triples = [(place, index, block) for place, index, block in blocks.reshape(-1, 3).tolist()]
        self._last = DecodePlan(members=members, slots=slots, starts=starts, new_blocks=triples)
        return self._last

    def _step(self, fields: tuple[Any, ...]) -> SchedulePlan:
        num_tokens, num_samples, max_query_len, rows = fields
        return SchedulePlan(
            requests=[self._row(*row) for row in rows],
            num_tokens=num_tokens,
            num_samples=num_samples,
            max_query_len=max_query_len,
            preempted=[],
        )

    def _row(
        self,
        slot: int,
        start: int,
        num_tokens: int,
        new_blocks: Sequence[int],
        first_new_block: int,
        samples: bool,
        admitted: dict[str, Any] | None,
    ) -> ScheduledRequest:
        if admitted is not None:
            self._requests[slot] = Request(max_total_tokens=0, **admitted)
        return ScheduledRequest(
            self._requests[slot],
            slot,
            start,
            num_tokens,
            new_blocks,
            first_new_block,
            admitted is not None,
            samples,
            0,
        )


def _fields(plan: SchedulePlan) -> tuple[Any, ...]:
    rows = [
        (
            row.slot,
            row.start,
            row.num_tokens,
            row.new_blocks,
            row.first_new_block,
            row.samples,
            _admitted(row.request) if row.is_new else None,
        )
        for row in plan.requests
    ]
    return plan.num_tokens, plan.num_samples, plan.max_query_len, rows


def _admitted(request: Request) -> dict[str, Any]:
    """What writing a request's row takes."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "output_token_ids": request.output_token_ids,
        "block_ids": request.block_ids,
        "params": request.params,
        "seed": request.seed,
        "stop_token_ids": request.stop_token_ids,
    }


def to_words(data: bytes) -> IntArray:
    """Bytes as whole words: their number, then the bytes, filled up."""
    return np.frombuffer(
        len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8), dtype="<i8"
    ).astype(np.int64, copy=False)


def to_bytes(words: IntArray) -> bytes:
    """The bytes that ``to_words`` was given."""
    data = words.astype("<i8", copy=False).tobytes()
    return data[8 : 8 + int(words[0])]
