"""The engine: requests in, tokens out, one step at a time. Read ``step`` first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakMethod, WeakSet

import torch

from ostinato.config import EngineConfig
from ostinato.engine.adapters import EngineAdapters
from ostinato.engine.checked_request import CheckedRequest, RequestChecks
from ostinato.engine.completion import Completion
from ostinato.engine.images import EngineImages
from ostinato.engine.replica_stats import ReplicaStats
from ostinato.engine.start import start
from ostinato.engine.structured import follow_grammar
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.errors import ClosedError, ConfigError, ModelLoadError, RequestError
from ostinato.graphs.capture.closing import Owner
from ostinato.loading.load import as_hf
from ostinato.loading.update import prepare_update
from ostinato.models.given_tensors import NamedTensors
from ostinato.outputs import Logprob
from ostinato.quoting import listed
from ostinato.runner.step_result import StepResult
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import FinishReason, Request
from ostinato.scheduling.scheduler import Scheduler
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
        self.scheduler = self._new_scheduler()
        self.adapters = EngineAdapters(self.runner)
        self.images = EngineImages(loaded, max_tokens=self.max_model_len)
        self._completions: dict[str, Completion] = {}
        self._submissions: WeakSet[Submission] = WeakSet()
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        # Committed tokens that are not in the outputs yet: empty, unless a step was interrupted.
        self._to_emit: deque[tuple[TokenEvent, StepResult]] = deque()
        self._ended: dict[Completion, None] = {}  # to be returned by ``step``
        # Batches that may run before the host has read their tokens.
        self._num_ahead = 1 if config.schedules_ahead_on(self.model.device) else 0
        self.grammars = Grammars(
            self.tokenizer,
            self.model.vocab_size,
            self.eos_token_ids,
            unsupported_reason=_no_structure(config),
        )
        self.runner.catch_up = _weakly(self._catch_up)
        self._checks = RequestChecks(
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            tokenizer=self.tokenizer,
            seed=config.seed,
            grammars=self.grammars,
        )
        self._half_written: set[str] = set()  # by an update that was interrupted
        self._closed = False

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """``ModelRunner.expert_load``, on every rank that runs the script."""
        return self.sharing.call(lambda: self.runner.expert_load(reset=reset))

    def _new_scheduler(self) -> Scheduler:
        config, cache, plan = self.config, self.runner.cache, self.runner.plan
        return Scheduler(
            BlockAllocator(
                cache.num_blocks,
                cache.block_size,
                enable_prefix_caching=config.enable_prefix_caching is not False
                and not self.model.recurrent_specs,
            ),
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=cache.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            num_drafts=config.num_drafts(self.model.device),
        )

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
        self._check_weights()
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
        used = {each.request.lora_slot for each in self._completions.values() if not each.finished}
        return used.union(*(each.lora_slots for each in self._submissions if each.num_left))

    @one_thread(is_part=True)
    def add(self, completion: Completion) -> None:
        """Queue a prepared sequence."""
        self._add(completion)

    def _add(self, completion: Completion) -> None:
        self._check_open()
        self._completions[completion.request.request_id] = completion
        self.scheduler.add(completion.request)

    @one_thread(is_part=True)
    def abort(self, completion: Completion) -> None:
        """End a sequence now, in any state, and free its blocks."""
        self._abort(completion)

    def _abort(self, completion: Completion) -> None:
        request = completion.request
        if self._completions.pop(request.request_id, None) is not None:
            self._scheduler_of(request).abort(request.request_id)
            completion.read_text(final=True)
            completion.output.finish_reason = FinishReason.ABORT.value
            completion.tell()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._to_emit)

    def _scheduler_of(self, request: Request) -> Scheduler:
        return self.scheduler

    def _num_to_start(self) -> int:
        """How many sequences to add now, of any number that wait outside the engine."""
        # The scheduler admits at most max_num_seqs at once. Every new request ends the steady
        # decode state, so start them in bursts.
        most = self.scheduler.max_num_seqs
        return 0 if self.scheduler.num_waiting >= most else 2 * most

    @one_thread(is_part=True)
    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes of all replicas; requests go on."""
        self._check_open()
        self.sharing.call(self._forget_prefixes)

    @one_thread(is_part=True)
    def update_weights(
        self, weights: str | PathLike[str] | NamedTensors, *, keep_prefix_cache: bool
    ) -> None:
        """Overwrite weights of the model in place, while no request is unfinished.

        If all ranks run the script, only the ``weights`` of rank 0 are read.
        """
        self._check_open()
        if self.config.enable_expert_parallel and self.config.world_size > 1:
            raise ConfigError(
                "update_weights does not support enable_expert_parallel: no rank has all experts "
                "to check; build a new LLM from the new checkpoint"
            )
        self.sharing.call(lambda: self._update_weights(weights, keep_prefix_cache))

    def _update_weights(
        self, weights: str | PathLike[str] | NamedTensors, keep_prefix_cache: bool
    ) -> None:
        if self.has_unfinished or any(each.num_left for each in self._submissions):
            raise RequestError(
                "weights cannot change while requests are unfinished: their keys and values are "
                "those of the old weights; read open streams to their ends or close() them first"
            )
        update = prepare_update(self.runner.models, weights)
        self._half_written |= update.names
        self.runner.write_weights(update)
        if not keep_prefix_cache:
            self._forget_prefixes()
        self._half_written -= update.names
        self.runner.ledger.check()

    def _check_weights(self) -> None:
        if self._half_written:
            raise ModelLoadError(
                "an update of the weights was interrupted, so some are old and some are new: "
                f"{listed(sorted(self._half_written))}; call update_weights with all of them again"
            )

    def _forget_prefixes(self) -> None:
        for scheduler in self._schedulers():
            scheduler.reset_prefix_cache()

    def _schedulers(self) -> Sequence[Scheduler]:
        return [self.scheduler]

    @one_thread(is_part=True)
    def replica_stats(self) -> list[ReplicaStats]:
        """Counts of each replica of the model; ``sum`` adds them up."""
        return [ReplicaStats.of(self.scheduler, self.runner.stats.counts)]

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
        if self._to_emit:
            return self._emit()
        try:
            plan = self.scheduler.schedule()
            if plan.num_tokens:
                self._in_flight.append((plan, self.runner.run(plan)))
            catches_up = not plan.num_tokens or len(self._in_flight) > self._num_ahead
            if self._in_flight and catches_up:
                self._commit_oldest()
        except BaseException:
            self._in_flight.clear()
            self._take_back_unheard_of()
            self.scheduler.rollback()
            self._end_unheard_of()
            raise
        return self._emit() if self._to_emit else []

    def _commit_oldest(self) -> None:
        plan, result = self._in_flight.popleft()
        self.scheduler.prepare_commit(plan)
        events = self.scheduler.commit(plan, result.token_ids())
        if self.grammars.are_used:
            self._end_complete(events)
        self._queue(events, result)

    def _catch_up(self) -> None:
        """Commit all steps in flight: the runner is in the next, and needs their tokens."""
        while self._in_flight:
            self._commit_oldest()

    def _end_complete(self, events: Sequence[TokenEvent]) -> None:
        """End requests whose text is complete by their grammar, and those that left it."""
        for event in events:
            request = event.request
            if request.constraint is None or request.finish_reason is FinishReason.STOP:
                continue
            reason, why = follow_grammar(request)
            if reason is not None:
                self._scheduler_of(request).finish(request, reason, why)
                event.finished = True

    def _queue(self, events: Sequence[TokenEvent], result: StepResult) -> None:
        """Keep the events that someone waits for until they are in the outputs."""
        self._to_emit += [(event, result) for event in events if event.is_heard]

    def _take_back_unheard_of(self) -> None:
        """Forget tokens whose log-probabilities are lost; they are sampled again, and are the same.

        They were committed in a step that is about to be rolled back.
        """
        self._to_emit.clear()
        for completion in self._completions.values():
            output = completion.output
            if output.logprobs is not None and len(output.token_ids) > len(output.logprobs):
                self._scheduler_of(completion.request).take_back(
                    completion.request, len(output.logprobs)
                )

    def _end_unheard_of(self) -> None:
        """Close sequences that the scheduler ended in a step that did not return them."""
        for name, completion in list(self._completions.items()):
            if completion.request.finish_reason is not None:
                completion.read_text(final=True)
                self._close(completion)
                del self._completions[name]
                completion.tell()

    def _emit(self) -> list[Completion]:
        """Update the outputs; return the sequences that ended. If interrupted, call it again."""
        while self._to_emit:
            event, result = self._to_emit[0]
            name = event.request.request_id
            completion = self._completions.get(name)
            if completion is not None:  # not aborted meanwhile
                try:
                    self._take_in(completion, event, result)
                except Exception:
                    self._to_emit.popleft()
                    self._drop(completion)  # it would fail again
                    raise
                except BaseException:
                    completion.forget_text()
                    raise
                completion.tell()
                if completion.finished:
                    self._ended[completion] = None
                    del self._completions[name]
            self._to_emit.popleft()
            if completion is not None and completion.finished:
                self.runner.learn(completion.output.token_ids)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def _drop(self, completion: Completion) -> None:
        """Abort a sequence whose output cannot be updated; its tokens so far stay."""
        name = completion.request.request_id
        self._scheduler_of(completion.request).abort(name)
        self._completions.pop(name, None)
        completion.output.finish_reason = FinishReason.ABORT.value
        completion.tell()

    def _take_in(self, completion: Completion, event: TokenEvent, result: StepResult) -> None:
        """Update a completion's logprobs, text and end for tokens already in its list."""
        request, output = completion.request, completion.output
        found = completion.read_text(final=event.finished)
        if output.logprobs is not None:
            num_new = len(output.token_ids) - len(output.logprobs)
            rows = [
                result.logprobs(index, request.params.logprobs or 0)
                for index in range(event.index, event.index + num_new)
            ]
            total = output.cumulative_logprob or 0.0
            for row in rows:
                total += row[0][1]
            decoded = [
                {
                    token: Logprob(logprob=value, decoded_token=self._decode_token(token))
                    for token, value in row
                }
                for row in rows
            ]
            # Both at the end: if all above is interrupted, it is done again from the start.
            output.logprobs += decoded
            output.cumulative_logprob = total
        if found is not None:
            if not event.finished:
                scheduler = self._scheduler_of(request)
                scheduler.finish(request, FinishReason.STOP, stop_reason=found)
            else:
                request.finish_reason, request.stop_reason = FinishReason.STOP, found
        self._close(completion)

    @staticmethod
    def _close(completion: Completion) -> None:
        """Copy the finish reason to the output, if the request has ended."""
        request, output = completion.request, completion.output
        if request.finish_reason is not None:
            output.finish_reason = request.finish_reason.value
            output.stop_reason = request.stop_reason

    def _decode_token(self, token: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token]))

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
            self._completions.clear()
            self._in_flight.clear()
            self._to_emit.clear()
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


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """``method`` without a reference to its object: a dropped engine must be freed at once."""
    kept = WeakMethod(method)

    def call() -> None:
        bound = kept()
        assert bound is not None, "the engine is in a step"
        bound()

    return call


def _no_structure(config: EngineConfig) -> str | None:
    """Why requests cannot have structured output, if they cannot."""
    if config.world_size == 1:
        return None
    return (
        f"this engine has {config.world_size} ranks, and masks are not sent to other ranks; use one"
    )


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
        """Abort unfinished sequences, and start no more."""
        self._to_start = iter(())
        for completion in list(self._started):
            self._engine._abort(completion)
        self._started.clear()
        self.num_left = self._num_to_start = 0
