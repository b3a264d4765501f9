"""A request while it is in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ostinato.sampling_params import SamplingParams


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
    """One sequence: the prompt, what was generated, and how much of it is in the KV cache.

    ``max_total_tokens`` is the length at which it ends whatever it says: prompt plus max_tokens,
    or the engine's limit. ``stop_token_ids`` end it (end-of-sequence tokens included, unless
    ignored); they are part of the output. ``slot`` is its row in the device state while it runs.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0  # that steps still running will give it
    num_computed_tokens: int = 0  # by all steps that were started
    num_cached_tokens: int = 0  # of the prompt, found in the cache when it was first admitted
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known
    slot: int | None = None
    watched: bool = False  # each of its tokens is news, not only its end

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """What it has, and what it will have when all steps that were started are done."""
        return self.num_tokens + self.num_pending_tokens

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
