"""A request while it is in the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ostinato.sampling_params import SamplingParams

NO_LORA = -1  # the slot of requests without an adapter


def num_active_loras(slots: Iterable[int]) -> int:
    """The number of different adapters in these slots."""
    return len({*slots} - {NO_LORA})


class Content(NamedTuple):
    """What tokens ``start`` to ``stop`` of a prompt stand for, if their ids do not say it."""

    start: int
    stop: int
    digest: bytes


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: the prompt, the output, and how many tokens are in the KV cache.

    ``max_total_tokens`` is the length at which it always ends: prompt plus max_tokens, or the
    engine's limit. ``stop_token_ids`` end it (end-of-sequence tokens included, unless ignored);
    they are part of the output. ``req_index`` is its row in the device state while it runs.
    ``lora_slot`` is the slot of its adapter. Requests share blocks of the KV cache only with
    requests of the same ``cache_salt``, and only if the ``contents`` of their tokens are the same.
    ``images``: those of the prompt, for the runner. ``constraint``: the ``Constraint`` of its
    output, if that is structured. ``replica`` is the replica of the model that runs it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    lora_slot: int = NO_LORA
    cache_salt: bytes = b""
    contents: Sequence[Content] = ()  # of fixed-length digests, in order
    images: Any = None
    constraint: Any = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0  # sampled by steps that are still running
    num_pending_drafts: int = 0  # of those steps; each that is accepted is one token more
    num_computed_tokens: int = 0  # by all steps started so far, without pending drafts
    num_cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks hashed so far
    req_index: int | None = None
    replica: int = 0
    watched: bool = False  # report every token, not only the end

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """The number of tokens once all started steps are done, if they accept no drafts."""
        # Not by ``num_tokens``: this is read for every request of a step.
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop`` of prompt and output together."""
        prompt, boundary = self.prompt_token_ids, len(self.prompt_token_ids)
        if stop <= boundary:
            return prompt[start:stop]
        output = self.output_token_ids[max(start - boundary, 0) : stop - boundary]
        return prompt[start:] + output if start < boundary else output
