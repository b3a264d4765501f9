"""One thread at a time: a second one gets an error instead of a race."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ostinato.errors import ConcurrentUseError

T = TypeVar("T")

_get_ident = threading.get_ident


class ExclusiveUse:
    """Lets one thread in at a time: a second one gets an error instead of a race.

    The thread inside may enter again. A signal handler that raises at any moment leaves it free:
    Python runs no handler between `with lock` and its block, as it may after a call of ``acquire``
    or of a context manager written in Python. Two threads that enter at exactly the same time enter
    one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None  # the thread inside

    def run(self, function: Callable[..., T], *args: Any) -> T:
        me = _get_ident()
        if self._thread is not None and self._thread != me:
            raise self.refusal()
        with self._lock:
            outer = self._thread
            self._thread = me
            try:
                return function(*args)
            finally:
                self._thread = outer

    def refusal(self) -> ConcurrentUseError:
        return ConcurrentUseError(
            f"thread {threading.current_thread().name!r} used graphs while another thread was "
            "capturing or replaying them; graphs of one pool share memory, so use one thread at a "
            "time or one pool per thread"
        )
