"""``TextStream``: the deltas of requests, step by step, and their end, however it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from ostinato.engine.completion import CheckedRequest, Completion
from ostinato.engine.engine import Engine, Submission
from ostinato.engine.thread_use import Hold, OpenStream
from ostinato.errors import ConcurrentUseError
from ostinato.graphs.capture.closing import Owner
from ostinato.outputs import TextDelta


class TextStream(Owner, Iterator[TextDelta]):
    """What each step adds to the completions; what ``LLM.stream`` returns.

    The requests start with the first delta. The end of the stream, ``close()``, leaving its
    ``with`` block and dropping the last reference abort what is unfinished. From the first delta to
    the end, only the thread that reads it may use the LLM; it may be handed to another one.
    """

    def __init__(self, engine: Engine, requests: Sequence[CheckedRequest]) -> None:
        self._ended = True  # nothing to end yet
        self._engine = engine
        self._submission = Submission(engine, requests, every_token=True)
        self._open = OpenStream()
        # Apart from this object, so that dropping it is dropping the last reference.
        self._source = engine.sharing.iterate(_deltas(self._submission))

    def __next__(self) -> TextDelta:
        use, hold, refused = self._engine.use, Hold("LLM.stream"), False
        try:
            try:
                use.enter(hold, stream=self._open)
            except ConcurrentUseError:
                refused = True  # it goes on when the other thread has left
                raise
            self._ended = False
            use.cover()
            with torch.inference_mode():
                return next(self._source)
        except BaseException:
            if not refused:
                self._end()
            raise
        finally:
            hold.done = True
            use.settle()

    def close(self) -> None:
        """Abort what is unfinished. Closing twice is harmless."""
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
        # In any thread, and in the middle of anything: only what is safe there.
        use = self._engine.use
        use.end_stream(self._open)
        use.defer(self._submission.abort)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a stream cannot be copied or pickled: its requests are in the engine; collect its "
            "deltas in a list and copy that"
        )


def _deltas(submission: Submission) -> Iterator[TextDelta]:
    shown: dict[Completion, tuple[int, int]] = {}  # characters and tokens
    # Other calls step the engine too, while the caller holds a delta.
    while submission.num_left:
        for number, completion in submission.step():
            output = completion.output
            num_chars, num_tokens = shown.pop(completion, (0, 0))
            if not completion.finished:
                shown[completion] = len(output.text), len(output.token_ids)
            if len(output.token_ids) == num_tokens:
                continue
            yield TextDelta(
                prompt_index=number,
                index=output.index,
                text=output.text[num_chars:],
                token_ids=output.token_ids[num_tokens:],
                finish_reason=output.finish_reason,
            )
