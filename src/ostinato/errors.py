"""Every exception that Ostinato raises deliberately.

A message says what went wrong, where, with which value, and what to do about it. Each class also
derives from the closest built-in exception, so that callers that do not know Ostinato can catch it.
"""

from __future__ import annotations

from collections.abc import Sequence


class OstinatoError(Exception):
    """Base of all errors raised by Ostinato."""


class ConfigError(OstinatoError, ValueError):
    """A setting is invalid: an unknown mode, a bad list of sizes, options that conflict."""


class BatchError(OstinatoError, ValueError):
    """A batch or an argument does not match what the graphs were built for."""


class MeasurementError(OstinatoError, RuntimeError):
    """A benchmark is inconclusive: its noise is larger than the measured effect."""


class RequestError(OstinatoError, ValueError):
    """A request cannot run: an empty or overlong prompt, a token id out of range."""


class ContextError(OstinatoError, RuntimeError):
    """The forward context was read while none is set."""


class CaptureError(OstinatoError, RuntimeError):
    """A capture failed or was not allowed. It leaves nothing behind.

    ``message`` says what and where; ``operator`` and ``source`` are the operator and the user's
    line that caused it, if known.
    """

    def __init__(
        self, message: str, *, operator: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.source = source


class CaptureOutOfMemoryError(CaptureError, MemoryError):
    """The device ran out of memory during a capture; the capture's memory was freed.

    ``message``, ``operator`` and ``source`` are as in ``CaptureError``.
    """


class ReplayMismatchError(OstinatoError, RuntimeError):
    """A replay was requested with arguments that differ from the captured ones."""


class StaleGraphError(ReplayMismatchError):
    """Graphs hold addresses of memory that has moved or was freed; they are not replayed.

    ``message`` names graph, node and owner. ``stale`` lists all such addresses (``StaleAddress``),
    where the ledger raised it.
    """

    def __init__(self, message: str, stale: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.stale = tuple(stale)


class ClosedError(OstinatoError, RuntimeError):
    """The object was closed; its graphs and their memory are gone."""


class AsleepError(OstinatoError, RuntimeError):
    """The engine is asleep: its weights or its KV cache are released. ``wake()`` it first."""


class SleepError(OstinatoError, MemoryError):
    """There is no room to sleep or to wake. Nothing is lost, and nothing has changed."""


class ConcurrentUseError(OstinatoError, RuntimeError):
    """Two threads used the graphs of one pool or one ``LLM`` at once, or two tasks one stream."""


class EngineFailedError(OstinatoError, RuntimeError):
    """The engine of an ``AsyncLLM`` failed, and takes no more requests; the answer is lost."""


class RequestFailedError(EngineFailedError):
    """The engine failed with this request; others go on."""


class OutOfBlocksError(OstinatoError, RuntimeError):
    """The KV cache has fewer free blocks than requested; none was taken."""


class SchedulingError(OstinatoError, RuntimeError):
    """The scheduler or its blocks were misused: a block freed twice, a plan skipped."""


class ModelLoadError(OstinatoError, RuntimeError):
    """A model could not be loaded: not found, incomplete, damaged, or too large for the device."""


class CollectiveError(OstinatoError, RuntimeError):
    """The ranks of a group called mismatched collectives, or one never joined."""


class RankFailedError(OstinatoError, RuntimeError):
    """Another rank died, hangs or reported an error. ``rank`` is its number, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])
