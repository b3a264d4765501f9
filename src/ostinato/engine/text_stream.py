"""``TextStream``: the text that each step adds to the completions of a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from ostinato import compat
from ostinato.engine.engine import Engine, Submission
from ostinato.engine.requests.checked_request import CheckedRequest
from ostinato.engine.requests.completion import Completion
from ostinato.engine.thread_use import Hold, OpenStream
from ostinato.errors import ConcurrentUseError
from ostinato.graphs.capture.closing import Owner
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.outputs import CompletionOutput, TextDelta
from ostinato.runner.ambient import without_default_device


class TextStream(Owner, Iterator[TextDelta]):
    """Yields the text that each step adds to the completions of ``requests``; ``LLM.stream`` makes
    one from its ``engine``.

    The requests start with the first delta. The end of the stream, ``close()``, leaving its
    ``with`` block and dropping the last reference abort unfinished requests. From the first delta
    to the end, only the thread that reads the stream may use the LLM. The stream may be handed to
    another thread.
    """

    _ended = True  # nothing to end yet, and nothing if ``__init__`` is interrupted

    def __init__(self, engine: Engine, requests: Sequence[CheckedRequest]) -> None:
        self._engine = engine
        self._submission = Submission(engine, requests, every_token=True)
        self._open = OpenStream()
        # Holds no reference to this object, so that dropping the stream runs __del__.
        self._source = engine.sharing.iterate(_deltas(self._submission))

    @without_default_device
    def __next__(self) -> TextDelta:
        use, hold, refused = self._engine.use, Hold("LLM.stream"), False
        try:
            try:
                use.enter(hold, stream=self._open)
            except ConcurrentUseError:
                refused = True  # the stream can go on once the other thread has left
                raise
            self._ended = False
            use.cover()
            with compat.inference_mode(True):
                return next(self._source)
        except BaseException:
            if not refused:
                self._end()
            raise
        finally:
            hold.done = True
            use.settle()

    def close(self) -> None:
        """Abort unfinished requests. Closing twice is harmless."""
        use, hold = self._engine.use, Hold("TextStream.close")
        try:
            use.enter(hold, stream=self._open)
            self._end()
        finally:
            hold.done = True
            use.settle()

    def _end(self) -> None:
        self._source = iter(())
        self._submission.abort()
        self._engine.use.end_stream(self._open)
        self._ended = True

    def __del__(self) -> None:
        if self._ended or sys.is_finalizing():
            return
        # May run in any thread, in the middle of anything.
        use = self._engine.use
        use.end_stream(self._open)
        use.defer(self._submission.abort)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a stream cannot be copied or pickled: its requests are in the engine; collect its "
            "deltas in a list and copy that"
        )


def _deltas(submission: Submission) -> Iterator[TextDelta]:
    shown: dict[Completion, Shown] = {}
    step = leaving_as_found(submission.step)  # a delta is too quick for that
    # Other calls may step the engine while the caller holds a delta.
    while submission.num_left:
        for number, completion in step():
            so_far = shown.pop(completion, None) or Shown()
            if not completion.finished:
                shown[completion] = so_far
            delta = so_far.delta(completion.output, number)
            if delta is not None:
                yield delta


class Shown:
    """How much of a completion was in its deltas so far."""

    __slots__ = ("num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = self.num_tokens = 0

    def delta(self, output: CompletionOutput, prompt_index: int = 0) -> TextDelta | None:
        """What ``output`` has beyond that; None if nothing, unless it has ended."""
        chars, tokens = self.num_chars, self.num_tokens
        self.num_chars, self.num_tokens = len(output.text), len(output.token_ids)
        if self.num_tokens <= tokens and self.num_chars <= chars and not output.finished:
            return None
        return TextDelta(
            prompt_index=prompt_index,
            index=output.index,
            text=output.text[chars:],
            token_ids=output.token_ids[tokens:],
            logprobs=None if output.logprobs is None else output.logprobs[tokens:],
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
