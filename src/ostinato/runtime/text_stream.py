"""``TextStream``: the deltas of requests, step by step, and their end, however it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn, TypeAlias

from ostinato.errors import ConcurrentUseError
from ostinato.runtime.engine import Completion, Engine
from ostinato.runtime.outputs import TextDelta
from ostinato.runtime.thread_use import Hold, OpenStream

Numbered: TypeAlias = tuple[int, Completion]  # with the number of its prompt


class TextStream(Iterator[TextDelta]):
    """What each step adds to the completions; what ``LLM.stream`` returns.

    The requests start with the first delta. The end of the stream, ``close()``, leaving its
    ``with`` block and dropping the last reference abort what is unfinished. From the first delta to
    the end, only the thread that reads it may use the LLM; it may be handed to another one.
    """

    def __init__(self, engine: Engine, completions: Sequence[Numbered]) -> None:
        self._ended = True  # nothing to end yet
        self._engine = engine
        self._completions = completions
        self._open = OpenStream()
        # Apart from this object, so that dropping it is dropping the last reference.
        self._source = engine.sharing.iterate(_deltas(engine, completions))

    def __next__(self) -> TextDelta:
        use, hold, refused = self._engine.use, Hold("LLM.stream"), False
        try:
            try:
                use.enter(hold, stream=self._open)
            except ConcurrentUseError:
                refused = True  # it goes on when the other thread has left
                raise
            self._ended = False
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
        abort_unfinished(self._engine, self._completions)
        self._engine.use.end_stream(self._open)
        self._ended = True

    def __del__(self) -> None:
        if self._ended or sys.is_finalizing():
            return
        # In any thread, and in the middle of anything: only what is safe there.
        use = self._engine.use
        use.end_stream(self._open)
        use.defer(partial(abort_unfinished, self._engine, self._completions))

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a stream cannot be copied or pickled: its requests are in the engine; collect its "
            "deltas in a list and copy that"
        )


def num_unfinished(completions: Sequence[Numbered]) -> int:
    return sum(not completion.finished for _, completion in completions)


def abort_unfinished(engine: Engine, completions: Sequence[Numbered]) -> None:
    for _, completion in completions:
        if not completion.finished:
            engine.abort(completion)


def _deltas(engine: Engine, completions: Sequence[Numbered]) -> Iterator[TextDelta]:
    for _, completion in completions:
        engine.add(completion)
    shown = [(0, 0)] * len(completions)
    finished = False
    while not finished:
        # Another call may finish them while the caller holds a delta, so look first.
        finished = not num_unfinished(completions)
        for position, (number, completion) in enumerate(completions):
            output, (num_chars, num_tokens) = completion.output, shown[position]
            if len(output.token_ids) == num_tokens:
                continue
            if not completion.finished:
                completion.read_text()
            shown[position] = len(output.text), len(output.token_ids)
            yield TextDelta(
                prompt_index=number,
                index=output.index,
                text=output.text[num_chars:],
                token_ids=output.token_ids[num_tokens:],
                finish_reason=output.finish_reason,
            )
        if num_unfinished(completions):
            engine.step()
