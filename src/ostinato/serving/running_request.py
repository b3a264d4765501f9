"""``RunningRequest``: one request in the engine's thread, from its start to its end."""

from __future__ import annotations

import asyncio
import time
from contextvars import copy_context

from ostinato.engine.engine import Engine
from ostinato.engine.requests.completion import Completion
from ostinato.engine.requests.prompt_reader import ReadPrompt
from ostinato.engine.text_stream import Shown
from ostinato.outputs import CompletionOutput, TextDelta
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import RequestStatus
from ostinato.serving.queues.delta_queue import DeltaQueue
from ostinato.serving.records import RequestRecord


class RunningRequest:
    """A request, its sequences, and the queue that takes what they generate.

    The loop of ``queue`` creates it; from then on it belongs to the engine's thread, which sets
    ``started`` once the request was found to be valid, and ``request_id`` before that. With
    ``every_token`` the queue gets ``TextDelta``s, of one step or several, otherwise only the
    ``CompletionOutput`` of each sequence that has ended.
    """

    def __init__(
        self,
        prompt: ReadPrompt,
        params: SamplingParams,
        adapter: str | None,
        *,
        every_token: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.prompt = prompt
        self.queue: DeltaQueue[TextDelta | CompletionOutput] = DeltaQueue(loop)
        self.started: asyncio.Future[None] = loop.create_future()
        self.request_id = ""
        self.completions: list[Completion] = []
        self.num_left = params.n
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self._params = params
        self._adapter = adapter
        self.every_token = every_token
        self._shown: dict[Completion, Shown] = {}
        self.arrived = time.monotonic()
        self._context = copy_context()

    def begin(self, engine: Engine) -> list[Completion]:
        """Check the request and create its sequences."""
        prompt = self.prompt
        checked = engine.check_request(
            prompt.token_ids,
            self._params,
            name=prompt.name,
            adapter=self._adapter,
            images=prompt.images,
        )
        self.request_id = checked.request_id
        self.completions = [checked.completion(index) for index in range(self._params.n)]
        return self.completions

    @property
    def is_waiting(self) -> bool:
        """Whether none of its sequences has been in a step."""
        return (
            self.scheduled is None
            and self.completions[0].request.status is RequestStatus.WAITING
            and not self.has_tokens
        )

    @property
    def has_tokens(self) -> bool:
        return any(completion.output.token_ids for completion in self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were in the KV cache."""
        return self.completions[0].request.num_cached_tokens if self.completions else 0

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(each.output.token_ids) for each in self.completions)

    def delta_of(self, completion: Completion) -> TextDelta | None:
        """What a sequence has beyond its last delta, if anything."""
        if not completion.finished:
            completion.read_text()  # the engine has read it, if it looks for stop strings
        shown = self._shown.setdefault(completion, Shown())
        return shown.delta(completion.output)

    def record(self, now: float) -> RequestRecord:
        """What is to be counted, at the end."""
        return RequestRecord(
            num_prompt_tokens=len(self.prompt.token_ids),
            num_generated_tokens=self.num_generated_tokens,
            num_sequences=self._params.n,
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            ended=now,
            finish_reason=self.completions[0].output.finish_reason or "abort",
            context=self._context,
        )
