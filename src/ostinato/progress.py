"""``ProgressBar``: tqdm, with a lock that an interrupt cannot leave held."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar.

    tqdm's lock is left in Python, and not at all if drawing a bar raises. So Ctrl-C may leave it
    held, and the next bar of another thread, shown or not, would wait for ever. A plain lock in a
    ``with`` block is left in C.
    """

    def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> Any:
        """Draw the bar. ``nolock``: the caller holds the lock. ``lock_args`` is not supported."""
        if nolock:
            return super().refresh(nolock=True)
        with self.get_lock():
            return super().refresh(nolock=True)


ProgressBar.set_lock(threading.RLock())
