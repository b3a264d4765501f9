"""``EngineThread``: the one thread that uses an ``LLM``. Requests come in, deltas go out.

Event loops put commands in a queue and never wait for the thread. Between two steps the thread
takes all commands that have come; after a step it hands each loop everything new in one call.
While there is nothing to step, it waits for a command, and looks after the ranks once a second;
with ``lazy_capture`` it captures missing graphs first.

Reading the text of hundreds of streams can take longer than a step. So a first token and an end go
out at once, and what is in between as often as it takes no more than a share of the thread's time:
with few streams after every step, with many after several, in larger deltas.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from ostinato.engine.requests.completion import Completion
from ostinato.errors import OstinatoError, RankFailedError, RequestFailedError
from ostinato.llm import LLM
from ostinato.quoting import said
from ostinato.serving.queues.inbox import Command, Inbox
from ostinato.serving.queues.outbox import Outbox
from ostinato.serving.records import RequestRecord
from ostinato.serving.running_request import RunningRequest

_log = logging.getLogger("ostinato.serving")

T = TypeVar("T")
Observer = Callable[[RequestRecord], None]

_DELIVERING = 0.1  # most of the thread's time for deltas between the first and the last of a stream


class EngineThread:
    """Builds an ``LLM`` in a thread, and runs it there. Everything public may be called anywhere.

    ``failure``: why the engine can take no more requests, if it cannot.
    """

    def __init__(self, build: Callable[[], LLM]) -> None:
        self.llm: LLM
        self.observers: list[Observer] = []
        self.prompt_tokens = self.generated_tokens = 0  # of requests that have ended
        self._close_error: BaseException | None = None
        self._inbox = Inbox()
        self._requests: dict[RunningRequest, None] = {}  # unfinished, in order of arrival
        self._of: dict[Completion, RunningRequest] = {}
        self._to_start: dict[RunningRequest, None] = {}  # those without a token yet
        self._news: deque[Completion] = deque()
        self._streamed: dict[Completion, None] = {}  # those that report more than their ends
        self._next_delivery = 0.0
        self._outbox = Outbox()
        self._built: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="ostinato-engine", daemon=True
        )
        try:
            self._thread.start()
            error = self._built.get()
        except BaseException:
            self._inbox.close()  # the thread frees what it builds, and ends
            raise
        if error is not None:
            self._thread.join()
            raise error

    # --- from any thread -----------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        return self._inbox.failure

    def start(self, request: RunningRequest) -> None:
        """Check and start a request; its ``started`` is set, or gets the error."""

        def refuse(error: OstinatoError) -> None:
            self._outbox.post_error(request.started, error)

        self._inbox.send(Command(partial(self._start, request), refuse))

    def abort(self, request: RunningRequest) -> None:
        """End a request before the next step, and free its blocks. Tells its queue nothing."""
        with suppress(OstinatoError):  # it ended with the engine
            self._inbox.send(Command(partial(self._abort, request), lambda _: None))

    def call(self, function: Callable[[LLM], T]) -> asyncio.Future[T]:
        """Run ``function`` between two steps; its result, for the running loop."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = function(self.llm)
            except BaseException as error:  # a panic from Rust, or sys.exit(): its caller waits
                self._outbox.post_error(future, error)
            else:
                self._outbox.post_result(future, result)

        def refuse(error: OstinatoError) -> None:
            self._outbox.post_error(future, error)

        self._inbox.send(Command(run, refuse))
        return future

    def close(self) -> None:
        """Abort what runs, free the model, and end the thread. Waits; closing twice is harmless."""
        self._inbox.close()
        if threading.current_thread() is self._thread:
            return  # the last reference was dropped there, in a collection of garbage
        self._thread.join()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def gone(self) -> OstinatoError:
        """Why there is no engine any more; a new error for each caller."""
        return self._inbox.gone()

    # --- in the thread -------------------------------------------------------------------------

    def _run(self, build: Callable[[], LLM]) -> None:
        try:
            self.llm = build()
        except BaseException as error:
            self._built.put(error)
            return
        self._built.put(None)
        try:
            self._serve()
        except BaseException as error:
            self._fail(error)
            self._inbox.wait_for_the_end()
        try:
            self.llm.close()
        except BaseException as error:
            self._close_error = error

    def _serve(self) -> None:
        while True:
            for command in self._inbox.take(wait=not self._requests and not self._may_capture):
                command.run()
            if self._inbox.has_ended:
                self._stop()
                return
            if self._requests:
                self._step()
            elif self.llm.task == "generate":
                self.llm.engine.check()
                if self._may_capture:  # one at a time: a request may have come
                    self.llm.engine.lifecycle.capture_next()
            self._flush()

    @property
    def _may_capture(self) -> bool:
        """Whether there is a graph to capture in the time that no request needs."""
        return self.llm.task == "generate" and self.llm.engine.lifecycle.captures_when_idle

    def _step(self) -> None:
        began = time.monotonic()
        try:
            self.llm.engine.step()
        except RankFailedError:
            raise  # whatever it has dropped: no step will succeed
        except Exception as error:
            if not self._end_dropped(error):
                raise
        now = time.monotonic()
        self._note_starts(began, now)
        while self._news:
            completion = self._news.popleft()
            if completion.finished and completion in self._of:  # not ended in the meantime
                self._end(completion, now)
        if self._streamed and now >= self._next_delivery:
            for completion in list(self._streamed):
                self._report(completion)
            done = time.monotonic()
            self._next_delivery = done + (done - now) * (1 / _DELIVERING - 1)

    def _note_starts(self, began: float, now: float) -> None:
        """Set the times of requests that a step, from ``began`` to ``now``, has admitted, and of
        first tokens."""
        started = []
        for request in self._to_start:
            if request.is_waiting:
                break  # and so are all behind it
            request.scheduled = request.scheduled or began
            if request.has_tokens:
                request.first_token = now
                started.append(request)
        for request in started:
            del self._to_start[request]
            for completion in request.completions:
                if completion in self._streamed and not completion.finished:
                    self._report(completion)  # an end is reported once, as one

    def _report(self, completion: Completion) -> None:
        """Hand over what a sequence has beyond its last delta."""
        request = self._of.get(completion)
        if request is None:
            return  # it has ended with another of its request
        try:
            delta = request.delta_of(completion)
        except Exception as error:
            self._end_with(request, error)
            return
        if delta is not None:
            self._outbox.post(request.queue.loop, request.queue.put, delta)

    def _end(self, completion: Completion, now: float) -> None:
        request = self._of[completion]
        if completion in self._streamed:
            self._report(completion)
        else:
            self._outbox.post(request.queue.loop, request.queue.put, completion.output)
        if self._of.pop(completion, None) is None:
            return  # its text could not be read
        self._streamed.pop(completion, None)
        request.num_left -= 1
        if not request.num_left:
            self._post_end(request)
            self._forget(request, now)

    def _end_dropped(self, error: Exception) -> bool:
        """End requests with a sequence that the engine dropped because of ``error``, if any."""
        dropped = {
            self._of[each]: None
            for each in self._news
            if each in self._of and each.output.finish_reason == "abort"
        }
        for request in dropped:
            self._end_with(request, error)
        return bool(dropped)

    def _end_with(self, request: RunningRequest, error: Exception) -> None:
        self._post_error(request, RequestFailedError(f"a request failed: {said(error)}"))
        self._abort(request)

    def _start(self, request: RunningRequest) -> None:
        try:
            completions = request.begin(self.llm.engine)
        except BaseException as error:  # whatever is wrong with it, the others go on
            self._outbox.post_error(request.started, error)
            return
        self._requests[request] = self._to_start[request] = None
        for completion in completions:
            completion.news = self._news
            self._of[completion] = request
            if request.every_token:
                self._streamed[completion] = None
            self.llm.engine.add(completion)
        self._outbox.post_result(request.started, None)

    def _abort(self, request: RunningRequest) -> None:
        if request not in self._requests:
            return  # it has ended, or was never started
        for completion in request.completions:
            self._streamed.pop(completion, None)
            if self._of.pop(completion, None) is not None:
                self.llm.engine.abort(completion)
        self._forget(request, time.monotonic())

    def _forget(self, request: RunningRequest, now: float) -> None:
        """Count a request that has ended, whichever way."""
        del self._requests[request]
        self._to_start.pop(request, None)
        record = request.record(now)
        self.prompt_tokens += record.num_prompt_tokens if record.first_token is not None else 0
        self.generated_tokens += record.num_generated_tokens
        for observe in self.observers:
            try:
                observe(record)
            except Exception:  # the request has its answer, and the others go on
                _log.exception("an observer of requests failed")

    @property
    def requests(self) -> list[RunningRequest]:
        """The unfinished requests; for calls between steps."""
        return list(self._requests)

    # --- to the loops --------------------------------------------------------------------------

    def _post_end(self, request: RunningRequest) -> None:
        self._outbox.post(request.queue.loop, lambda _: request.queue.end(), None)

    def _post_error(self, request: RunningRequest, error: OstinatoError) -> None:
        self._outbox.post(request.queue.loop, request.queue.fail, error)

    def _flush(self) -> None:
        for loop in self._outbox.flush():  # no caller is left in these
            for request in self.requests:
                if request.queue.loop is loop:
                    self._abort(request)

    # --- the end -------------------------------------------------------------------------------

    def _stop(self) -> None:
        for request in self.requests:
            self._post_error(request, self.gone())
            self._abort(request)
        self._flush()

    def _fail(self, error: BaseException) -> None:
        """Give all callers the error. The engine takes no more requests: its state is unknown."""
        # Where, but not its text, which may quote a request.
        where = "".join(traceback.format_tb(error.__traceback__))
        _log.error("the engine failed with %s, at\n%s", type(error).__name__, where)
        self._inbox.fail(
            f"the engine failed: {type(error).__name__}: {said(error)}; all its requests are "
            "lost, and it takes no more: build a new AsyncLLM, or restart the server"
        )
        for request in self.requests:
            self._post_error(request, self.gone())
        self._requests.clear()
        self._streamed.clear()
        self._flush()
