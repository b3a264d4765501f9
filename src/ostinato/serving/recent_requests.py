"""``RecentRequests``: how long requests took lately, for a page that shows it live."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from ostinato.serving.percentiles import percentiles
from ostinato.serving.records import RequestRecord

_MOST = 512
_WINDOW_S = 300.0


class RecentRequests:
    """Keeps the last requests that ended, up to five minutes ago. For any thread."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def observe(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)

    def summary(self) -> dict[str, Any]:
        """Their number, and percentiles of their times in milliseconds; None where there is none.

        ``ttft_ms``: to the first token, ``tpot_ms``: per token after it, ``e2e_ms``: all of it.
        """
        earliest = time.monotonic() - _WINDOW_S
        with self._lock:
            records = [each for each in self._records if each.ended >= earliest]
        return {
            "num_requests": len(records),
            "window_s": _WINDOW_S,
            "ttft_ms": _milliseconds([each.time_to_first_token for each in records]),
            "tpot_ms": _milliseconds([each.time_per_token for each in records]),
            "e2e_ms": _milliseconds([each.ended - each.arrived for each in records]),
        }


def _milliseconds(seconds: list[float | None]) -> dict[str, float] | None:
    return percentiles([each * 1e3 for each in seconds if each is not None])
