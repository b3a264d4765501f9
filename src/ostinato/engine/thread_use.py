"""Lets one thread at a time into an engine: a second one gets an error at once, not a race.

Calls (``LLM.generate``) consist of parts (``Engine.step``). A call keeps other threads out until
it returns, and a stream does so from its first delta to its end. Between two deltas no call is
inside, so the thread that reads the stream may generate, abort or close.

Finalisers run in any thread, in the middle of anything; their work is deferred until no call is
inside.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ostinato.errors import ConcurrentUseError
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.runner.ambient import without_default_device

P = ParamSpec("P")
R = TypeVar("R")


class Hold:
    """One call or part of a call, inside from ``ThreadUse.enter`` until ``done`` is set.

    Set ``done`` in a ``finally``: a plain store is the one release that no interrupt can prevent.
    """

    __slots__ = ("done", "is_part", "method", "thread")

    def __init__(self, method: str, is_part: bool = False) -> None:
        self.method = method
        self.is_part = is_part
        self.thread = threading.current_thread()
        self.done = False


_OUTSIDE = Hold("")
_OUTSIDE.done = True


class OpenStream:
    """A stream between its first delta and its end. ``thread`` is its last reader.

    Only the stream refers to it, so it dies with the stream.
    """

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class ThreadUse:
    """Tracks which thread is in an engine. Never waits for another thread's call."""

    def __init__(self) -> None:
        # Held for a few instructions; reentrant, for signal handlers and finalisers in between.
        self._guard = threading.RLock()
        # The last call and part to enter; each is inside until it is done.
        self._call = _OUTSIDE
        self._part = _OUTSIDE
        self._streams: set[weakref.ref[OpenStream]] = set()
        self._deferred: deque[Callable[[], None]] = deque()

    def enter(self, hold: Hold, *, stream: OpenStream | None = None) -> None:
        """Let ``hold`` in or raise ``ConcurrentUseError``.

        ``stream`` is the open stream that the call reads. It then belongs to the calling thread,
        even if another thread read it before.
        """
        call, is_part = self._call, hold.is_part
        if is_part and not call.done and call.thread is hold.thread and self._part.done:
            self._part = hold  # its own call keeps all others out
            return
        with self._guard:
            call, part = self._call, self._part
            own_call = is_part and call.thread is hold.thread
            if not (part.done and (call.done or own_call)):
                raise _refusal(hold, part if call.done else call)
            if call.done and self._streams:
                self._check_streams(hold, stream)
            if is_part:
                self._part = hold
            else:
                self._call = hold
            if stream is not None:
                stream.thread = hold.thread
                self._streams.add(weakref.ref(stream))

    def cover(self) -> None:
        """Make the call that is inside keep out parts too, until it ends.

        For calls that step the engine directly: signal handlers, finalisers and callbacks of the
        same thread may run in between.
        """
        self._part = self._call

    def _check_streams(self, hold: Hold, stream: OpenStream | None) -> None:
        for reference in tuple(self._streams):
            other = reference()
            if other is None:
                self._streams.discard(reference)
                continue
            # A thread that has ended reads no more.
            if other is not stream and other.thread is not hold.thread and other.thread.is_alive():
                raise ConcurrentUseError(
                    f"thread {hold.thread.name!r} called {hold.method} while a stream of thread "
                    f"{other.thread.name!r} was open; read it to its end or close() it first, use "
                    "one LLM per thread, or hand requests to one thread"
                )

    def end_stream(self, stream: OpenStream) -> None:
        self._streams.discard(weakref.ref(stream))

    # --- deferred work of finalisers -----------------------------------------------------------

    def defer(self, work: Callable[[], None]) -> None:
        """Do ``work`` now, or when the call inside (of any thread) has left."""
        self._deferred.append(work)
        self.settle()

    def settle(self) -> None:
        """Do deferred work, unless a call is inside, which does it when it leaves."""
        while self._deferred:
            hold = Hold("the end of a stream that was dropped")
            try:
                with self._guard:
                    if not (self._call.done and self._part.done):
                        return
                    self._call = hold
                while self._deferred:
                    self._deferred.popleft()()
            finally:
                hold.done = True


def _refusal(hold: Hold, holder: Hold) -> ConcurrentUseError:
    if holder.thread is hold.thread:
        return ConcurrentUseError(
            f"{hold.method} was called inside {holder.method} of the same thread, from a signal "
            "handler, a finaliser or a callback; call it after that has returned"
        )
    return ConcurrentUseError(
        f"thread {hold.thread.name!r} called {hold.method} while thread {holder.thread.name!r} was "
        f"in {holder.method}; only one thread at a time may use an LLM: use one LLM per thread, or "
        "hand requests to one thread"
    )


class HasThreadUse(Protocol):
    @property
    def use(self) -> ThreadUse: ...


S = TypeVar("S", bound=HasThreadUse)


def one_thread(
    called: str | None = None, *, is_part: bool = False
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Let one thread at a time into an engine's methods with this decorator.

    Errors call the method ``called``, or by its qualified name if None. ``is_part``: the method may
    run inside a call of the same thread. Methods run without the caller's default device, and
    calls that raise leave their thread as they found it.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = called or method.__qualname__
        run = without_default_device(method)
        if not is_part:
            run = leaving_as_found(run)

        @functools.wraps(method)
        def exclusive(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            use, hold = self.use, Hold(name, is_part)
            try:
                use.enter(hold)
                return run(self, *args, **kwargs)
            finally:
                hold.done = True
                use.settle()

        return exclusive

    return decorate
