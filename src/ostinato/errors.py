"""Every exception Ostinato raises on purpose.

Messages are written for the person who reads them at three in the morning: what went wrong, where,
which value, and what to do about it. Each class also derives from the built-in exception that fits
it, so callers that do not know Ostinato can still catch it sensibly.
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Base of all errors raised by Ostinato."""


class ConfigError(OstinatoError, ValueError):
    """A setting is wrong: an unknown mode, a bad list of sizes, options that exclude each other."""


class BatchError(OstinatoError, ValueError):
    """A batch or an argument does not fit what the graphs were built for."""


class MeasurementError(OstinatoError, RuntimeError):
    """A benchmark measured nothing: its noise is larger than what was to be measured."""


class RequestError(OstinatoError, ValueError):
    """A request cannot be run: an empty or too long prompt, a token id that does not exist."""


class ContextError(OstinatoError, RuntimeError):
    """The forward context was read where none is set."""


class CaptureError(OstinatoError, RuntimeError):
    """A capture failed or was not allowed. Nothing of it is left behind.

    ``operator`` and ``source`` name what broke it and the user's line, where they are known.
    """

    def __init__(
        self, message: str, *, operator: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.source = source


class CaptureOutOfMemoryError(CaptureError, MemoryError):
    """The device ran out of memory during a capture; what the capture took was given back."""


class ReplayMismatchError(OstinatoError, RuntimeError):
    """A replay was asked for with arguments that differ from the captured ones."""


class ClosedError(OstinatoError, RuntimeError):
    """The object was closed; its graphs and their memory are gone."""


class ConcurrentUseError(OstinatoError, RuntimeError):
    """Two threads used the graphs of one pool, or one ``LLM``, at the same time."""


class OutOfBlocksError(OstinatoError, RuntimeError):
    """The KV cache has fewer free blocks than were asked for; none was taken."""


class SchedulingError(OstinatoError, RuntimeError):
    """The scheduler or its blocks were used out of order: a block freed twice, a plan skipped."""


class ModelLoadError(OstinatoError, RuntimeError):
    """A model could not be loaded: not found, incomplete, damaged, or too large for the device."""


class CollectiveError(OstinatoError, RuntimeError):
    """The ranks of a group called collectives that do not fit together, or one never came."""


class RankFailedError(OstinatoError, RuntimeError):
    """Another rank died, hangs or reported an error. ``rank`` says which, if it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])
