"""How often threads take turns while an engine's thread and an event loop share an interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 5e-4


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Within it, the engine's thread waits at most 0.5 ms, not Python's 5 ms, for its turn: a loop
    that sends hundreds of events would delay the next step. It holds for the whole process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
