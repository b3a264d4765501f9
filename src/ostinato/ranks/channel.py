"""The channel from rank 0 to all others: one small message per step, through the CPU.

It never uses the GPU's communicators, so no rank waits for a device to learn what comes next.
Waiting for a message has no time limit, because a server may be idle for days. The wait ends if
rank 0 is gone; the watchdog detects hung ranks from the progress recorded here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ostinato.errors import CollectiveError
from ostinato.ranks.plan_message import Kind, Message
from ostinato.ranks.watch.progress import Progress
from ostinato.scheduling.step_plan import IntArray

# Words in the message that is always sent. A steady step lists the blocks that were added, three
# words each; with room for 20 of them, few steps need a second message.
_WORDS = 64
_HEAD = 2  # kind, number of words that follow
_KINDS = frozenset(Kind)


class Broadcaster(Protocol):
    """The part of a communicator that a channel needs: a broadcast from rank 0."""

    def broadcast(self, tensor: torch.Tensor) -> None: ...


class Channel:
    """Messages from rank 0, which calls ``send``, to all others, which call ``receive``.

    Records in ``progress`` where this rank is; rank 0 must have announced the step before.
    """

    def __init__(self, group: Broadcaster, progress: Progress | None = None) -> None:
        self._group = group
        self._progress = Progress() if progress is None else progress
        self._buffer = torch.zeros(_WORDS, dtype=torch.int64)
        self._words = self._buffer.numpy()  # the same memory

    def send(self, kind: Kind, words: IntArray) -> None:
        count = len(words)
        self._words[:_HEAD] = kind, count
        fits = count <= _WORDS - _HEAD
        if fits:
            self._words[_HEAD : _HEAD + count] = words
        self._progress.run()  # first, because sending blocks until the others receive
        self._group.broadcast(self._buffer)
        if not fits:
            self._group.broadcast(torch.from_numpy(words.copy()))

    def receive(self) -> Message:
        """The next message. Its words are valid until the following call."""
        self._progress.expect()
        self._group.broadcast(self._buffer)
        kind, count = self._words[:_HEAD].tolist()
        if kind not in _KINDS or count < 0:
            raise CollectiveError(
                f"received a message of kind {kind} with {count} words from rank 0; all ranks must "
                "run the same version"
            )
        words = self._words[_HEAD : _HEAD + count]
        if count > _WORDS - _HEAD:
            rest = torch.empty(count, dtype=torch.int64)
            self._group.broadcast(rest)
            words = rest.numpy()
        self._progress.run()
        return Kind(kind), words
