"""The engine: requests in, tokens out, one step at a time. Read ``step`` first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

import torch

from ostinato.config import EngineConfig
from ostinato.engine.emitter import Emitter
from ostinato.engine.lifecycle.adapters import EngineAdapters
from ostinato.engine.lifecycle.lifecycle import EngineLifecycle
from ostinato.engine.memory_samples import MemorySamples
from ostinato.engine.replica_stats import ReplicaStats
from ostinato.engine.requests.checked_request import CheckedRequest, RequestChecks
from ostinato.engine.requests.completion import Completion
from ostinato.engine.requests.images import EngineImages
from ostinato.engine.requests.structured import end_complete, no_structure
from ostinato.engine.start import new_scheduler, start
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.errors import ClosedError
from ostinato.graphs.capture.closing import Owner, weakly
from ostinato.graphs.policy.dispatch import RunTime
from ostinato.loading.load import as_hf
from ostinato.runner.step_result import StepResult
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.step_plan import StepPlan, TokenEvent
from ostinato.structured.grammars import Grammars

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.vision.prompt_images import PromptImages


class Engine(Owner):
    """Owns the model, the runner and the scheduler. One thread at a time may use it (``use``).

    When all ranks run one script, the engine of rank 0 takes the requests; the others hold their
    part of the model and follow it (``sharing``).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.use = ThreadUse()
        started = start(config)
        loaded = started.loaded
        self.model = loaded.model
        self.model_path = loaded.path
        self._model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.runner, self.resolved_mode = started.runner, started.resolved_mode
        self.sharing = started.sharing
        self.max_model_len = self.runner.cache.max_model_len
        self.scheduler = new_scheduler(config, self.model, self.runner)
        self.schedulers = [self.scheduler]  # one per replica of the model
        self.adapters = EngineAdapters(self.runner)
        self.images = EngineImages(loaded, max_tokens=self.max_model_len)
        self._emitter = Emitter(self.schedulers, self.tokenizer, self.runner.learn)
        self._submissions: WeakSet[Submission] = WeakSet()
        self._in_flight: deque[tuple[StepPlan, StepResult, float, RunTime]] = deque()
        self.memory = MemorySamples(self.runner, self.schedulers)
        self._num_steps, self._last_end = 0, 0.0
        # Batches that may run before the host has read their tokens.
        self._num_ahead = 1 if config.schedules_ahead_on(self.model.device) else 0
        self.grammars = Grammars(
            self.tokenizer,
            self.model.vocab_size,
            self.eos_token_ids,
            unsupported_reason=no_structure(config),
        )
        self.runner.sampler.catch_up = weakly(self._catch_up)
        self._checks = RequestChecks(
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            tokenizer=self.tokenizer,
            seed=config.seed,
            grammars=self.grammars,
        )
        self.lifecycle = EngineLifecycle(
            config,
            self.runner,
            self.schedulers,
            sharing=self.sharing,
            use=self.use,
            check_open=weakly(self._check_open),
            is_busy=weakly(self._is_busy),
        )
        self._closed = False

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """``ModelRunner.expert_load``, on every rank that runs the script."""
        self._check_open()
        return self.sharing.call(lambda: self.runner.expert_load(reset=reset))

    @property
    def model_config(self) -> PretrainedConfig:
        """The model's config as a transformers object."""
        return as_hf(self._model_config)

    # --- requests ------------------------------------------------------------------------------

    @one_thread(is_part=True)
    def prepare_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, name: str = "the prompt"
    ) -> list[Completion]:
        """Check a request and create its ``params.n`` sequences. Starts nothing.

        Errors refer to the prompt as ``name``.
        """
        request = self._check_request(prompt_token_ids, params, name, None, None)
        return [request.completion(index) for index in range(params.n)]

    @one_thread(is_part=True)
    def check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        name: str = "the prompt",
        adapter: str | None = None,
        images: PromptImages | None = None,
    ) -> CheckedRequest:
        """Check a request without creating its sequences yet. ``adapter``: the name of a LoRA.

        ``images``: those of the prompt, as ``self.images.place`` returned both.
        """
        return self._check_request(prompt_token_ids, params, name, adapter, images)

    def _check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        name: str,
        adapter: str | None,
        images: PromptImages | None,
    ) -> CheckedRequest:
        self._check_open()
        self.lifecycle.check_ready()
        return self._checks.check(
            list(prompt_token_ids),
            params,
            name=name,
            eos_token_ids=self.eos_token_ids,
            adapter=None if adapter is None else self.adapters.find(adapter),
            images=images,
        )

    @one_thread(is_part=True)
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the PEFT adapter in ``path`` as ``name``, or replace the one of that name."""
        self._check_open()
        self.adapters.load(name, path, in_use=self._slots_in_use())

    @one_thread(is_part=True)
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on; its slot is free when they have ended."""
        self._check_open()
        self.adapters.unload(name)

    def _slots_in_use(self) -> set[int]:
        """The slots of adapters that unfinished requests use, or will use."""
        used = {
            each.request.lora_slot
            for each in self._emitter.completions.values()
            if not each.finished
        }
        return used.union(*(each.lora_slots for each in self._submissions if each.num_left))

    @one_thread(is_part=True)
    def add(self, completion: Completion) -> None:
        """Queue a prepared sequence."""
        self._add(completion)

    def _add(self, completion: Completion) -> None:
        self._check_open()
        self.lifecycle.check_awake()
        self._emitter.completions[completion.request.request_id] = completion
        self.scheduler.add(completion.request)

    @one_thread(is_part=True)
    def abort(self, completion: Completion) -> None:
        """End a sequence now, in any state, and free its blocks."""
        self._abort(completion)

    def _abort(self, completion: Completion) -> None:
        self._emitter.abort(completion)

    @property
    def has_unfinished(self) -> bool:
        return any(each.has_unfinished for each in self.schedulers) or bool(self._emitter.queued)

    def _is_busy(self) -> bool:
        """Whether a request is unfinished, of those too that wait outside the engine."""
        return self.has_unfinished or any(each.num_left for each in self._submissions)

    def _num_to_start(self) -> int:
        """How many sequences to add now, of any number that wait outside the engine."""
        # A scheduler admits at most max_num_seqs at once. Every new request ends the steady
        # decode state, so start them in bursts.
        most = sum(each.max_num_seqs for each in self.schedulers)
        num_waiting = sum(each.num_waiting for each in self.schedulers)
        return 0 if num_waiting >= most else 2 * most

    @one_thread(is_part=True)
    def replica_stats(self) -> list[ReplicaStats]:
        """Counts of each replica of the model; ``sum`` adds them up."""
        return [ReplicaStats.of(self.scheduler, self.runner.stats.counts)]

    @one_thread(is_part=True)
    def check(self) -> None:
        """Raise if a rank has failed. Every step does so itself; for times without steps."""
        self.runner.check()

    # --- one step ------------------------------------------------------------------------------

    @one_thread(is_part=True)
    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Start a batch, process the results of the previous one; return the sequences that ended.

        With ``async_scheduling`` the device always has a batch to run while the host processes the
        tokens of the previous one; without it, both are the same batch. If a step raises or is
        interrupted, no token is lost: batches in flight are computed again, and the next call
        returns what this one would have. A sequence whose text cannot be decoded is aborted.
        """
        return self._step()

    def _step(self) -> list[Completion]:
        if self._closed:
            raise _closed()
        if self._emitter.queued:
            return self._emitter.emit()
        try:
            plan = self.scheduler.schedule()
            if plan.num_tokens:
                started, result = perf_counter(), self.runner.run(plan)
                self._in_flight.append((plan, result, started, self.runner.stats.run_time))
            catches_up = not plan.num_tokens or len(self._in_flight) > self._num_ahead
            if self._in_flight and catches_up:
                self._commit_oldest()
        except BaseException:
            self._in_flight.clear()
            self._emitter.take_back_unreported()
            self.scheduler.rollback()
            self._emitter.end_unreported()
            raise
        return self._emitter.emit() if self._emitter.queued else []

    def _commit_oldest(self) -> None:
        plan, result, started, run_time = self._in_flight.popleft()
        self.scheduler.prepare_commit(plan)
        events = self.scheduler.commit(plan, result.token_ids())
        self._count_step(started, run_time)
        if self.grammars.are_used:
            end_complete(events, self.schedulers)
        self._queue(events, result)

    def _count_step(self, started: float, run_time: RunTime) -> None:
        """A step has ended; since the end of the previous one it had the device to itself."""
        now = perf_counter()
        run_time.num_runs += 1
        run_time.seconds += now - max(started, self._last_end)
        self._last_end = now
        self._num_steps += 1
        if self._num_steps % self.memory.period == 0:
            self.memory.take()

    def _catch_up(self) -> None:
        """Commit all steps in flight: the runner is in the next, and needs their tokens."""
        while self._in_flight:
            self._commit_oldest()

    def _queue(self, events: Sequence[TokenEvent], result: StepResult) -> None:
        """Keep the events that a caller waits for until they are in the outputs."""
        for event in events:
            if event.is_reported:
                self._emitter.queued.append((event, result))

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Free the graphs, the KV cache and the weights. Closing twice is harmless.

        Everything is freed even if one part raises, and even when memory has run out.
        """
        self.runner.pool.free_spare()
        self._give_back()

    @one_thread("Engine.close", is_part=True)
    def _give_back(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._emitter.clear()
            self._in_flight.clear()
            self.runner.close()
        finally:
            del self.model

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another one with Engine(engine.config)"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


def _closed() -> ClosedError:
    return ClosedError("the engine is closed; build a new one")


class Submission:
    """Runs the requests of one call through the engine, from start to end.

    Requests start in order. Sequences are created only when the engine can run them, so a long
    queue costs little. With ``every_token``, ``step`` reports each token, otherwise only ends.

    The caller must have entered the engine and covered its parts (``ThreadUse.cover``): steps do
    not check again.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[CheckedRequest], *, every_token: bool
    ) -> None:
        self._engine = engine
        self._every_token = every_token
        self._to_start: Iterator[tuple[int, CheckedRequest, int]] = (
            (number, request, index)
            for number, request in enumerate(requests)
            for index in range(request.params.n)
        )
        self.num_completions = sum(request.params.n for request in requests)
        self.num_left = self.num_completions
        self.lora_slots = {each.adapter.slot for each in requests if each.adapter is not None}
        engine._submissions.add(self)
        self._num_to_start = self.num_completions
        self._started: dict[Completion, int] = {}  # unfinished ones, with their prompts' numbers
        self._news: deque[Completion] = deque()

    def step(self) -> Iterable[tuple[int, Completion]]:
        """Start sequences if there is room and run one engine step, in inference mode.

        Returns the completions that changed, with the numbers of their prompts.
        """
        if self._num_to_start:
            self._start_some()
        self._engine._step()
        return self._take_news() if self._news else ()

    def _start_some(self) -> None:
        """Start as many sequences as the engine may admit in its next steps."""
        for number, request, index in islice(self._to_start, self._engine._num_to_start()):
            self._num_to_start -= 1
            completion = request.completion(index)
            completion.news = self._news
            completion.request.watched |= self._every_token
            self._started[completion] = number
            self._engine._add(completion)

    def _take_news(self) -> Iterator[tuple[int, Completion]]:
        while self._news:
            completion = self._news.popleft()
            number = self._started.get(completion)
            if number is None:
                continue  # its end was already reported
            if completion.finished:
                del self._started[completion]
                self.num_left -= 1
            yield number, completion

    def abort(self) -> None:
        """Abort unfinished sequences, and start no others."""
        self._to_start = iter(())
        for completion in list(self._started):
            self._engine._abort(completion)
        self._started.clear()
        self.num_left = self._num_to_start = 0
