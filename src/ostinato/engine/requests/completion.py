"""One sequence of a request and its output so far; created when the engine can run it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ostinato.outputs import CompletionOutput
from ostinato.scheduling.request import Request
from ostinato.text.detokenizer import Detokenizer


@dataclass(eq=False)
class Completion:
    """One sequence in the engine, and its output so far.

    ``output.token_ids`` grows with every step. ``output.text`` is complete once the sequence ends;
    until then ``read_text`` updates it. The engine reads sequences with stop strings every step.

    The engine appends the completion to ``news``, if set, when it ends, and on every token if its
    request is watched.
    """

    request: Request
    output: CompletionOutput
    detokenizer: Detokenizer | None
    news: deque[Completion] | None = None

    @property
    def finished(self) -> bool:
        return self.output.finished

    def tell(self) -> None:
        """Append this completion to ``news``."""
        if self.news is not None:
            self.news.append(self)

    def read_text(self, *, final: bool = False) -> str | None:
        """Decode the tokens added since the last call; return the stop string found, if any.

        Tokens after the one that completes a stop string are dropped: a step may add several.
        """
        detokenizer = self.detokenizer
        if detokenizer is None:
            return None
        found = detokenizer.read(self.output.token_ids, self.request.params.min_tokens)
        if found is not None:
            del self.output.token_ids[detokenizer.num_read :]
        if final and found is None:
            detokenizer.finish()
        self.output.text = detokenizer.text
        return found

    def close(self) -> None:
        """Copy the finish reason to the output, if the request has ended."""
        request, output = self.request, self.output
        if request.finish_reason is not None:
            output.finish_reason = request.finish_reason.value
            output.stop_reason = request.stop_reason

    def forget_text(self) -> None:
        """Decode all tokens again at the next ``read_text``: the last one was interrupted."""
        if self.detokenizer is not None:
            self.detokenizer = self.detokenizer.anew()
