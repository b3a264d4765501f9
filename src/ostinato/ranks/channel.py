"""The channel from rank 0 to all others: one small message for each step, through the CPU.

It never touches the GPU's communicators, so no rank waits for a device to learn what comes next.
Waiting for a message has no time limit: a server may be idle for days. That rank 0 is gone ends the
wait; that it, or another rank, hangs is the watchdog's to find out, by the progress noted here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ostinato.errors import CollectiveError
from ostinato.ranks.plan_message import Kind, Message
from ostinato.ranks.progress import Progress
from ostinato.scheduling.schedule_plan import IntArray

# Words of the message that always goes out. A steady step says which blocks were added, three words
# each; with room for 20 of them, hardly any takes a second message.
_WORDS = 64
_HEAD = 2  # kind, number of words that follow
_KINDS = frozenset(Kind)


class Broadcaster(Protocol):
    """The part of a communicator that a channel needs: rank 0's tensor to everybody's."""

    def broadcast(self, tensor: torch.Tensor) -> None: ...


class Channel:
    """Messages from rank 0, which calls ``send``, to all others, which call ``receive``.

    ``progress`` is told where in that this rank is; rank 0 has announced the step to it before.
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
        self._progress.run()  # before: sending waits until the others receive
        self._group.broadcast(self._buffer)
        if not fits:
            self._group.broadcast(torch.from_numpy(words.copy()))

    def receive(self) -> Message:
        """The next message. What it holds is valid until the one after it."""
        self._progress.expect()
        self._group.broadcast(self._buffer)
        kind, count = self._words[:_HEAD].tolist()
        if kind not in _KINDS or count < 0:
            raise CollectiveError(
                f"a message of kind {kind} with {count} words came from rank 0; all ranks must run "
                "the same version"
            )
        words = self._words[_HEAD : _HEAD + count]
        if count > _WORDS - _HEAD:
            rest = torch.empty(count, dtype=torch.int64)
            self._group.broadcast(rest)
            words = rest.numpy()
        self._progress.run()
        return Kind(kind), words
