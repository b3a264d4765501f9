"""Walking a plan: every entry in order, with progress, a report, and one policy for failures."""

from __future__ import annotations

import itertools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from ostinato.errors import CaptureError, CaptureOutOfMemoryError, OstinatoError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.plan import PlanEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """What capturing one entry took. ``error`` is set if it failed and runs eagerly instead."""

    entry: PlanEntry
    num_graphs: int
    num_bytes: int
    seconds: float
    error: str | None = None


@dataclass(kw_only=True)
class CaptureReport:
    """What a capture of a plan took, entry by entry."""

    entries: list[EntryReport] = field(default_factory=list)

    @property
    def num_graphs(self) -> int:
        return sum(entry.num_graphs for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries)


def describe_entry(entry: PlanEntry) -> str:
    """An entry as messages name it, unless the caller of ``capture_entries`` has its own words."""
    return f"{entry.descriptor} ({entry.phase})"


def capture_entries(
    entries: Sequence[PlanEntry],
    capture: Callable[[PlanEntry], None],
    *,
    pool: GraphPool,
    dispatcher: Dispatcher,
    eager_fallback: bool,
    show_progress: bool,
    name: str,
    describe: Callable[[PlanEntry], str] = describe_entry,
) -> CaptureReport:
    """Capture ``entries`` in order with ``capture``, open each for dispatch, build its tables.

    If one fails, those before it stay usable, and what the failed one took is given back. With
    ``eager_fallback`` its batches run eagerly and the walk goes on; otherwise it stops there.
    The error says "capturing ``describe(entry)`` failed".
    """
    report = CaptureReport()
    with pool.capturing():
        for phase, group in itertools.groupby(entries, key=lambda entry: entry.phase):
            bar = tqdm(list(group), desc=f"{name}: {phase}", disable=not _shown(show_progress))
            for entry in bar:
                report.entries.append(
                    _capture_one(entry, capture, pool, dispatcher, eager_fallback, describe)
                )
    dispatcher.build()  # now, and not when the first batch waits for an answer
    return report


def _capture_one(
    entry: PlanEntry,
    capture: Callable[[PlanEntry], None],
    pool: GraphPool,
    dispatcher: Dispatcher,
    eager_fallback: bool,
    describe: Callable[[PlanEntry], str],
) -> EntryReport:
    start = time.perf_counter()
    outer_error = sys.exception()
    bytes_before, serial_before = pool.num_bytes, pool.serial
    graphs_before = pool.num_graphs_captured
    message: str | None = None
    try:
        capture(entry)
        if pool.serial == serial_before:
            raise CaptureError(
                "the forward ran, but captured nothing: nothing in it is wrapped for "
                f"{entry.mode.name} (CUDAGraphWrapper), so this size would always run eagerly"
            )
        dispatcher.mark_captured(entry)
    except BaseException as error:
        if not isinstance(error, Exception):  # an interrupt: nothing to explain
            pool.discard(range(serial_before + 1, pool.serial + 1))
            raise
        wrapped = _describe_failure(describe(entry), error)
        _drop_frames(error, until=outer_error)
        pool.discard(range(serial_before + 1, pool.serial + 1))
        pool.release_unused()
        if not eager_fallback:
            raise wrapped from error
        dispatcher.mark_refused(entry, Reason.CAPTURE_FAILED)
        message = str(wrapped)
        logger.warning("%s; its batches will run eagerly", message)
    return EntryReport(
        entry=entry,
        num_graphs=0 if message else pool.num_graphs_captured - graphs_before,
        num_bytes=pool.num_bytes - bytes_before,
        seconds=time.perf_counter() - start,
        error=message,
    )


def _drop_frames(error: BaseException | None, *, until: BaseException | None) -> None:
    """Let the failed run's frames go: the tensors they hold would keep the memory taken.

    Errors that were being handled before the run (``until``) keep theirs.
    """
    while error is not None and error is not until:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _describe_failure(entry: str, error: Exception) -> CaptureError:
    """The error to raise, with the failed run's traceback as text, since its frames must go."""
    described = _named_failure(entry, error)
    described.add_note("".join(traceback.format_exception(error)))
    return described


def _named_failure(entry: str, error: Exception) -> CaptureError:
    text = f"capturing {entry} failed: {_with_type(error)}"
    if isinstance(error, (CaptureOutOfMemoryError, MemoryError, torch.OutOfMemoryError)):
        return CaptureOutOfMemoryError(
            f"{text}. The graphs captured before it are usable; capture smaller sizes or leave the "
            "graphs more memory"
        )
    operator = error.operator if isinstance(error, CaptureError) else None
    source = error.source if isinstance(error, CaptureError) else None
    return CaptureError(text, operator=operator, source=source)


def _with_type(error: Exception) -> str:
    """An error's text, led by its type where it is not one of ours: a KeyError's text is a key."""
    if isinstance(error, OstinatoError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(show_progress: bool) -> bool:
    """Progress belongs on one screen: the first rank's."""
    if not show_progress:
        return False
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0
