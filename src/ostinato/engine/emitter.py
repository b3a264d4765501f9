"""``Emitter``: from the tokens of committed steps to the outputs of their completions.

A step that is interrupted, by a signal or by an error, loses none of them: what is not in an output
yet stays queued, and what was half written is written again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.engine.requests.completion import Completion
from ostinato.outputs import Logprob
from ostinato.runner.step_result import StepResult
from ostinato.scheduling.request import FinishReason
from ostinato.scheduling.scheduler import Scheduler
from ostinato.scheduling.step_plan import TokenEvent
from ostinato.text.detokenizer import token_text

logger = logging.getLogger(__name__)


class Emitter:
    """Holds the unfinished ``completions`` by request id, and writes their outputs.

    ``schedulers`` has that of each replica. ``learn`` takes the tokens of every sequence that has
    ended. ``queued`` is empty between steps, unless one was interrupted.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        tokenizer: Any,
        learn: Callable[[Sequence[int]], None],
    ) -> None:
        self.completions: dict[str, Completion] = {}
        self.queued: deque[tuple[TokenEvent, StepResult]] = deque()
        self._ended: dict[Completion, None] = {}  # to be returned by ``emit``
        self._schedulers = schedulers
        self._tokenizer = tokenizer
        self._learn = learn

    def emit(self) -> list[Completion]:
        """Update the outputs; return the sequences that ended. If interrupted, call it again."""
        while self.queued:
            event, result = self.queued[0]
            name = event.request.request_id
            completion = self.completions.get(name)
            if completion is not None:  # not aborted in the meantime
                try:
                    self._take_in(completion, event, result)
                except Exception:
                    self.queued.popleft()
                    self._drop(completion)  # it would fail again
                    raise
                except BaseException:
                    completion.forget_text()
                    raise
                completion.tell()
                if completion.finished:
                    self._ended[completion] = None
                    del self.completions[name]
            self.queued.popleft()
            if completion is not None and completion.finished:
                self._learn(completion.output.token_ids)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def abort(self, completion: Completion) -> None:
        """End a sequence now, in any state, and free its blocks."""
        request = completion.request
        if self.completions.pop(request.request_id, None) is not None:
            self._schedulers[request.replica].abort(request.request_id)
            if self.queued:  # a step was interrupted, and no other may come to find these
                kept = (each for each in self.queued if each[0].request is not request)
                self.queued = deque(kept)
            try:
                _read_rest(completion)
            finally:
                completion.output.finish_reason = FinishReason.ABORT.value
                completion.tell()

    def take_back_unreported(self) -> None:
        """Forget tokens whose log-probabilities are lost; they are sampled again, and are the same.

        They were committed in a step that is about to be rolled back.
        """
        self.queued.clear()
        for completion in self.completions.values():
            request, output = completion.request, completion.output
            if output.logprobs is not None and len(output.token_ids) > len(output.logprobs):
                self._schedulers[request.replica].take_back(request, len(output.logprobs))

    def end_unreported(self) -> None:
        """Close sequences that the scheduler ended in a step that did not return them."""
        for name, completion in list(self.completions.items()):
            if completion.request.finish_reason is not None:
                if _read_rest(completion):
                    completion.close()
                else:
                    completion.output.finish_reason = FinishReason.ABORT.value
                del self.completions[name]
                completion.tell()

    def clear(self) -> None:
        """Forget all completions."""
        self.completions.clear()
        self.queued.clear()

    def _drop(self, completion: Completion) -> None:
        """Abort a sequence whose output cannot be updated; its tokens so far stay."""
        request = completion.request
        self._schedulers[request.replica].abort(request.request_id)
        self.completions.pop(request.request_id, None)
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
                scheduler = self._schedulers[request.replica]
                scheduler.finish(request, FinishReason.STOP, stop_reason=found)
            else:
                request.finish_reason, request.stop_reason = FinishReason.STOP, found
        completion.close()

    def _decode_token(self, token: int) -> str | None:
        return None if self._tokenizer is None else token_text(self._tokenizer, token)


def _read_rest(completion: Completion) -> bool:
    """Read the text of a sequence that is over; returns whether its tokenizer could decode it.

    Nothing is raised, since others are to be ended too.
    """
    try:
        completion.read_text(final=True)
    except Exception as error:
        # Not the error's text, which quotes the request.
        kind = type(error.__cause__ or error).__name__
        logger.warning("the text of a sequence that was aborted ends early (%s)", kind)
        return False
    return True
