"""Brings the results of other replicas to rank 0, which schedules the requests of all.

The first rank of a replica sends the tokens of its steps, and rank 0 receives them in order. With
``num_ahead`` 1, a replica's results follow when it has started its next step, so that its device is
never without work; if there is no next step, rank 0 asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ostinato.parallel.distributed import DistributedComm
from ostinato.runner.step_result import StepResult
from ostinato.scheduling.step_plan import IntArray

NUM_COUNTS = 4  # of DispatchStats
_HEAD = 2  # rows with logprobs, columns


class ResultSender:
    """On the first rank of a replica: sends its results to rank 0 of ``group``."""

    def __init__(self, group: DistributedComm, num_ahead: int) -> None:
        self._group = group
        self._num_ahead = num_ahead
        self._unsent: deque[StepResult | None] = deque()  # by step; None: nothing was sampled
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # of the last result

    def add(self, result: StepResult | None) -> None:
        """Send the results of earlier steps, after this one was started."""
        self._unsent.append(result)
        while len(self._unsent) > self._num_ahead:
            self._send(self._unsent.popleft())

    def flush(self) -> None:
        """Send the results of all steps."""
        while self._unsent:
            self._send(self._unsent.popleft())

    def _send(self, result: StepResult | None) -> None:
        if result is None:
            return
        tokens = result.token_ids()
        # Rank 0 has received the result before the last one when it sends another step.
        for work, _ in self._sent:
            work.wait()
        found = result.all_logprobs()
        shape = (0, 0) if found is None else found.tokens.shape
        messages = [np.concatenate((np.array(shape, dtype=np.int64), tokens))]
        if found is not None:
            rows = np.array(found.rows, dtype=np.int64)
            values = found.values.astype(np.float64).view(np.int64)
            messages.append(np.concatenate((rows, found.tokens.reshape(-1), values.reshape(-1))))
        self._start(messages)

    def send_counts(self, counts: Sequence[int]) -> None:
        """Send ``NUM_COUNTS`` numbers, after all results."""
        self.flush()
        self._start([np.array(counts, dtype=np.int64)], also=self._sent)

    def _start(
        self, messages: list[IntArray], also: Sequence[tuple[dist.Work, torch.Tensor]] = ()
    ) -> None:
        self._sent = [*also]
        for message in messages:
            tensor = torch.from_numpy(message)
            self._sent.append((self._group.send(tensor, 0), tensor))


class RemoteResult(StepResult):
    """On rank 0: the results of a step of another replica.

    ``receive`` receives the results of that replica up to this one.
    """

    def __init__(self, step: int, num_samples: int, receive: Callable[[int], None]) -> None:
        super().__init__()
        self.step = step
        self.num_samples = num_samples
        self._receive = receive

    def token_ids(self) -> IntArray:
        if self._token_ids is None and self.num_samples:
            self._receive(self.step)
        return super().token_ids()

    def read(self, group: DistributedComm, rank: int) -> None:
        """Wait for the results, which ``rank`` sends next."""
        head = torch.empty(_HEAD + self.num_samples, dtype=torch.int64)
        group.receive(head, rank)
        self._token_ids = head.numpy()[_HEAD:]
        rows, columns = head[:_HEAD].tolist()
        if rows:
            rest = torch.empty(rows * (1 + 2 * columns), dtype=torch.int64)
            group.receive(rest, rank)
            numbers, tokens, values = rest.split((rows, rows * columns, rows * columns))
            self._filtered_rows = numbers.tolist()
            self._logprob_copies = (
                tokens.view(rows, columns),
                values.view(torch.float64).view(rows, columns),
            )


class ResultReceiver:
    """On rank 0: receives the results of the replica whose first rank is ``rank``."""

    def __init__(self, group: DistributedComm, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._expected: deque[RemoteResult] = deque()

    def expect(self, result: RemoteResult) -> None:
        if result.num_samples:
            self._expected.append(result)

    def receive_up_to(self, step: int) -> None:
        """Receive all results of steps up to ``step``, even those that were given up."""
        while self._expected and self._expected[0].step <= step:
            self._expected[0].read(self._group, self._rank)
            self._expected.popleft()

    def receive_counts(self) -> list[int]:
        """What ``ResultSender.send_counts`` sends, after all results."""
        while self._expected:
            self._expected.popleft().read(self._group, self._rank)
        counts = torch.empty(NUM_COUNTS, dtype=torch.int64)
        self._group.receive(counts, self._rank)
        numbers: list[int] = counts.tolist()
        return numbers
