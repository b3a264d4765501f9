"""``Inbox``: commands from any thread to the engine's thread, until it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from ostinato.errors import ClosedError, EngineFailedError, OstinatoError

_WAIT_S = 1.0


class Command:
    """Something to do between two steps: ``run()``, or ``refuse(error)`` if it is too late."""

    __slots__ = ("refuse", "run")

    def __init__(
        self, run: Callable[[], object], refuse: Callable[[OstinatoError], object]
    ) -> None:
        self.run = run
        self.refuse = refuse


class Inbox:
    """A queue of commands that closes: each gets in before the end, or is refused.

    ``failure``: why the engine has failed, if it has. ``has_ended``: whether the engine's thread,
    the one that takes commands, has met the end.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.has_ended = False
        self._closed = False
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: the end
        # Held for a few instructions. Reentrant: a stream may be dropped, and so abort its request,
        # in the middle of anything.
        self._gate = threading.RLock()

    # --- from any thread -----------------------------------------------------------------------

    def send(self, command: Command) -> None:
        with self._gate:
            if self._closed or self.failure is not None:
                raise self.gone()
            self._commands.put(command)

    def close(self) -> None:
        """Take no more commands. Closing twice is harmless."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._commands.put(None)

    def gone(self) -> OstinatoError:
        """A new error for each caller: each gets a traceback of its own."""
        if self.failure is not None:
            return EngineFailedError(self.failure)
        return ClosedError("the AsyncLLM is closed; build a new one")

    # --- in the engine's thread ----------------------------------------------------------------

    def take(self, *, wait: bool) -> Iterator[Command]:
        """All commands there are, up to the end; if there is none, ``wait`` for one, but no longer
        than a second."""
        while not self.has_ended:
            try:
                command = self._commands.get(block=wait, timeout=_WAIT_S)
            except Empty:
                return
            wait = False
            if command is None:
                self.has_ended = True
            else:
                yield command

    def fail(self, why: str) -> None:
        """Take no more commands because the engine has failed, and refuse those there are."""
        with self._gate:
            self.failure = why
        self.refuse_all()

    def refuse_all(self) -> None:
        """Refuse all commands there are. Nothing else comes in, except the end."""
        for command in self.take(wait=False):
            command.refuse(self.gone())

    def wait_for_the_end(self) -> None:
        """Wait until ``close`` is called."""
        while not self.has_ended:
            for command in self.take(wait=True):
                command.refuse(self.gone())
