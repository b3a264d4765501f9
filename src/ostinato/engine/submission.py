"""The requests of one call on their way through the engine: started, heard of, ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from ostinato.engine.engine import CheckedRequest, Completion, Engine


class Submission:
    """Requests that are done together, in their order; for one call at a time.

    Their sequences are made as the engine can use them, so that what waits costs little however
    much it is. With ``every_token`` there is news of each token, otherwise only of ends.
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
        self._started: dict[Completion, int] = {}  # unfinished ones, with their prompts' numbers
        self._news: deque[Completion] = deque()

    def start_some(self) -> list[tuple[int, Completion]]:
        """Start as many as the engine may admit in its next steps; with their prompts' numbers."""
        scheduler = self._engine.scheduler
        # It admits at most all its rows at once. What runs steadily is disturbed by every new
        # request, so they come in bursts.
        if scheduler.num_waiting >= scheduler.max_num_seqs:
            return []
        started = []
        for number, request, index in islice(self._to_start, 2 * scheduler.max_num_seqs):
            completion = request.completion(index)
            completion.news = self._news
            completion.request.watched |= self._every_token
            self._started[completion] = number
            self._engine.add(completion)
            started.append((number, completion))
        return started

    def news(self) -> Iterator[tuple[int, Completion]]:
        """Those that something happened to since, with their prompts' numbers."""
        while self._news:
            completion = self._news.popleft()
            number = self._started.get(completion)
            if number is None:
                continue  # its end was told already
            if completion.finished:
                del self._started[completion]
                self.num_left -= 1
            yield number, completion

    def abort(self) -> None:
        """End what is unfinished, and start nothing more."""
        self._to_start = iter(())
        for completion in list(self._started):
            self._engine.abort(completion)
        self._started.clear()
        self.num_left = 0
