"""Encodes step plans from rank 0 to the others: requests, blocks and sampling parameters.

A steady-state step sends only what changed since the previous one: the added blocks. So it fits
easily into the one small message that ``Channel`` sends for every step.

A message is numbers, plus the sampling parameters of new requests as JSON: decoding one can produce
nothing but a plan, whatever it contains.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from ostinato.errors import CollectiveError
from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import Request, num_active_loras
from ostinato.scheduling.step_plan import (
    DecodePlan,
    IntArray,
    ScheduledRequest,
    SchedulePlan,
    StepPlan,
)


class Kind(IntEnum):
    """The kind of a message."""

    STEP = 1  # a plan, request by request
    DECODE = 2  # the first plan of a steady state
    DECODE_AGAIN = 3  # the next plan of the same steady state
    RESULT = 4  # what a call on rank 0 returned or raised
    CLOSE = 5
    REPLICAS = 6  # a step of all replicas: STEP, DECODE, DECODE_AGAIN or IDLE for each
    IDLE = 7  # no plan
    SEND_RESULTS = 8  # rank 0 waits for the results of the last step
    ADAPTER = 9  # the weights of a LoRA adapter
    SEND_COUNTS = 10  # rank 0 waits for what other replicas counted
    LEARN = 11  # the outputs of requests that have ended
    EXPERT_LOAD = 12  # all ranks add up their counts; 1: and start again
    WEIGHTS = 13  # new values of one of the model's weights
    CLEAR_GRAPHS = 14
    CAPTURE_GRAPHS = 15
    SLEEP = 16  # 1: and keep the weights
    WAKE = 17
    CAPTURE_ENTRY = 18  # index of the model, of the entry in its plan


Message: TypeAlias = tuple[Kind, IntArray]
_DEFAULTS = vars(SamplingParams())
_OF_REPLICA = (Kind.STEP, Kind.DECODE, Kind.DECODE_AGAIN, Kind.IDLE)
_NOTHING = np.empty(0, dtype=np.int64)


class PlanEncoder:
    """On rank 0: encodes plans. Tracks which steady state the other ranks know."""

    def __init__(self) -> None:
        self._req_indices: IntArray | None = None

    def encode(self, plan: StepPlan) -> Message:
        if not isinstance(plan, DecodePlan):
            self._req_indices = None
            return Kind.STEP, _step_words(plan)
        blocks = np.array(plan.new_blocks, dtype=np.int64).reshape(-1)
        if plan.req_indices is self._req_indices:
            return Kind.DECODE_AGAIN, blocks
        self._req_indices = plan.req_indices
        count = np.array([len(plan.req_indices)], dtype=np.int64)
        starts = plan.starts + plan.step
        return Kind.DECODE, np.concatenate((count, plan.req_indices, starts, blocks))


class ReplicaEncoder:
    """On rank 0: encodes the plans of all replicas as one message, which all ranks get."""

    def __init__(self, num_replicas: int) -> None:
        self._encoders = [PlanEncoder() for _ in range(num_replicas)]

    def encode(self, plans: Sequence[StepPlan]) -> Message:
        parts: list[IntArray] = []
        for encoder, plan in zip(self._encoders, plans, strict=True):
            kind, words = encoder.encode(plan) if plan.num_tokens else (Kind.IDLE, _NOTHING)
            parts += (np.array([kind, len(words)], dtype=np.int64), words)
        return Kind.REPLICAS, np.concatenate(parts)


def message_of_replica(words: IntArray, replica: int) -> Message:
    """The message of one replica in one for all; raise ``CollectiveError`` if it is not there."""
    reader = _Reader(words)
    try:
        for _ in range(replica):
            reader.take(1)
            reader.take_list()
        kind = Kind(*reader.take(1))
        if kind not in _OF_REPLICA:
            raise ValueError(f"it is {kind.name}")
        return kind, np.array(reader.take_list(), dtype=np.int64)
    except (LookupError, ValueError) as error:
        raise CollectiveError(
            f"a message of {len(words)} words has no plan of replica {replica} "
            f"({type(error).__name__}: {error}); all ranks must run the same version"
        ) from error


def _step_words(plan: SchedulePlan) -> IntArray:
    words = [plan.num_tokens, plan.num_samples, plan.max_query_len, plan.num_drafts]
    words.append(len(plan.requests))
    for row in plan.requests:
        blocks = row.new_blocks
        words += (row.req_index, row.start, row.num_tokens, row.first_new_block)
        words.append(row.request.num_pending_drafts)
        words += (row.samples, row.is_new, len(blocks), *blocks)
        if row.is_new:
            _add_request(words, row.request)
    return np.frombuffer(array("q", words), dtype=np.int64)  # faster than np.array


def _add_request(words: list[int], request: Request) -> None:
    """Add what the runner needs to write a request's row."""
    words += (request.seed, request.lora_slot)
    for ids in (
        request.prompt_token_ids,
        request.output_token_ids,
        request.block_ids,
        request.stop_token_ids,
    ):
        words.append(len(ids))
        words += ids
    given = {name: v for name, v in vars(request.params).items() if v != _DEFAULTS[name]}
    for text in (request.request_id, json.dumps(given, default=vars)):
        words += to_words(text.encode()).tolist()


class PlanDecoder:
    """On the other ranks: decodes messages into plans equivalent to rank 0's for a runner.

    Decoded requests carry only what a runner reads. Of that, pending drafts are kept up to date.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by request row
        self._last: DecodePlan | None = None

    def decode(self, kind: Kind, words: IntArray) -> StepPlan:
        """Decode a plan; raise ``CollectiveError`` if rank 0 cannot have sent it."""
        try:
            if kind is Kind.STEP:
                self._last = None
                return self._step(_Reader(words))
            return self._decode_step(kind, words)
        except (LookupError, ValueError, TypeError) as error:
            raise CollectiveError(
                f"a message of {len(words)} words is not a plan ({type(error).__name__}: {error}); "
                "all ranks must run the same version, and nothing else may write to their sockets"
            ) from error

    def _decode_step(self, kind: Kind, words: IntArray) -> StepPlan:
        if kind is Kind.DECODE:
            count = int(words[0])
            if not 0 <= 2 * count < len(words):
                raise ValueError(f"{count} requests")
            req_indices = words[1 : count + 1].copy()
            starts = words[count + 1 : 2 * count + 1].copy()
            blocks = words[2 * count + 1 :]
            members = [self._requests[index] for index in req_indices.tolist()]
            num_loras = num_active_loras(request.lora_slot for request in members)
            shape = BatchShape(count, count, 1, num_loras)
        elif self._last is None:
            raise CollectiveError("a plan refers to an earlier plan that did not arrive")
        else:
            last = self._last
            members, req_indices, starts = last.members, last.req_indices, last.starts + 1
            blocks, shape = words, last.shape
        triples = [(row, index, block) for row, index, block in blocks.reshape(-1, 3).tolist()]
        self._last = DecodePlan(
            num_tokens=len(members),
            shape=shape,
            members=members,
            req_indices=req_indices,
            starts=starts,
            new_blocks=triples,
        )
        return self._last

    def _step(self, reader: _Reader) -> SchedulePlan:
        num_tokens, num_samples, max_query_len, num_drafts, num_rows = reader.take(5)
        rows = [self._row(reader) for _ in range(num_rows)]
        reader.check_end()
        return SchedulePlan(
            requests=rows,
            num_tokens=num_tokens,
            num_samples=num_samples,
            max_query_len=max_query_len,
            preempted=[],
            num_drafts=num_drafts,
        )

    def _row(self, reader: _Reader) -> ScheduledRequest:
        req_index, start, num_tokens, first_new_block, pending_drafts, samples, is_new = (
            reader.take(7)
        )
        new_blocks = reader.take_list()
        if is_new:
            self._requests[req_index] = _read_request(reader)
        request = self._requests[req_index]
        request.num_pending_drafts = pending_drafts
        return ScheduledRequest(
            request,
            req_index,
            start,
            num_tokens,
            new_blocks,
            first_new_block,
            bool(is_new),
            bool(samples),
            0,
        )


def _read_request(reader: _Reader) -> Request:
    seed, lora_slot = reader.take(2)
    prompt, output, blocks, stop = (reader.take_list() for _ in range(4))
    return Request(
        request_id=reader.take_bytes().decode(),
        prompt_token_ids=prompt,
        params=_params(reader.take_bytes()),
        max_total_tokens=0,
        seed=seed,
        stop_token_ids=frozenset(stop),
        lora_slot=lora_slot,
        output_token_ids=output,
        block_ids=blocks,
    )


@lru_cache(maxsize=64)  # most requests reuse the parameters of an earlier one
def _params(text: bytes) -> SamplingParams:
    given = json.loads(text)
    bias = given.pop("logit_bias", {})
    return SamplingParams(logit_bias={int(token): value for token, value in bias.items()}, **given)


def encode_outputs(outputs: Sequence[Sequence[int]]) -> Message:
    """Encode the outputs of requests, for ``decode_outputs``."""
    words = [word for token_ids in outputs for word in (len(token_ids), *token_ids)]
    return Kind.LEARN, np.array(words, dtype=np.int64)


def decode_outputs(words: IntArray) -> list[list[int]]:
    """Decode outputs; raise ``CollectiveError`` if rank 0 cannot have sent them."""
    reader, outputs = _Reader(words), []
    try:
        while not reader.at_end:
            outputs.append(reader.take_list())
    except IndexError as error:
        raise CollectiveError(
            f"a message of {len(words)} words has no outputs of requests ({error}); all ranks must "
            "run the same version"
        ) from error
    return outputs


class _Reader:
    """Reads the words of a message in order."""

    def __init__(self, words: IntArray) -> None:
        self._array = words
        self._words: list[int] = words.tolist()
        self._at = 0

    def take(self, count: int) -> list[int]:
        start, self._at = self._at, self._at + count
        if not start <= self._at <= len(self._words):
            raise IndexError(f"{count} words from number {start} on")
        return self._words[start : self._at]

    @property
    def at_end(self) -> bool:
        return self._at == len(self._words)

    def check_end(self) -> None:
        if not self.at_end:
            raise IndexError(f"{self._at} words are the whole plan")

    def take_list(self) -> list[int]:
        (count,) = self.take(1)
        return self.take(count)

    def take_bytes(self) -> bytes:
        start = self._at
        (count,) = self.take(1)
        self.take(-(-count // 8))
        return to_bytes(self._array[start : self._at])


def to_words(data: bytes) -> IntArray:
    """Pack bytes into whole words: their number, then the bytes, padded."""
    return np.frombuffer(
        len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8), dtype="<i8"
    ).astype(np.int64, copy=False)


def to_bytes(words: IntArray) -> bytes:
    """The inverse of ``to_words``."""
    data = words.astype("<i8", copy=False).tobytes()
    return data[8 : 8 + int(words[0])]
