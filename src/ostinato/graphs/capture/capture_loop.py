"""Walks the entries of a plan in order, with progress, a report, and one policy for failures."""

from __future__ import annotations

import itertools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ostinato.errors import CaptureError, CaptureOutOfMemoryError, OstinatoError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.progress import ProgressBar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """The cost of capturing one entry. ``error`` is set if it failed and runs eagerly instead.

    ``num_bytes``: memory that it added to the pool, which later entries share.
    ``executable_bytes``: memory of the graphs themselves. CUDA's driver allocates that in chunks
    for several graphs, and the entry that needed a new chunk has all of it: only sums over many
    entries mean something.
    """

    entry: PlanEntry
    num_graphs: int
    num_bytes: int
    seconds: float
    error: str | None = None
    executable_bytes: int = 0


@dataclass(kw_only=True)
class CaptureReport:
    """The cost of capturing a plan. ``entries``: one report for each, in the order of capture.

    ``buffer_bytes``: of the buffers that FULL graphs copy their outputs to.
    """

    entries: list[EntryReport] = field(default_factory=list)
    buffer_bytes: int = 0

    @property
    def num_graphs(self) -> int:
        """Graphs of all entries; a PIECEWISE entry has several."""
        return sum(entry.num_graphs for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Memory that the entries added to the pool."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def executable_bytes(self) -> int:
        """Memory of the graphs themselves, beside the pool."""
        return sum(entry.executable_bytes for entry in self.entries)

    @property
    def seconds(self) -> float:
        """The time all captures took, warm-ups included."""
        return sum(entry.seconds for entry in self.entries)


def describe_entry(entry: PlanEntry) -> str:
    """The default name of an entry in messages."""
    return f"{entry.descriptor} ({entry.phase})"


class CaptureLoop:
    """A walk over entries of a plan: progress, a report, and one policy for failures.

        loop = CaptureLoop(pool, dispatcher, ...)
        with loop:
            for entry in loop.over(entries):
                try:
                    ...  # capture it
                except BaseException as error:
                    loop.failed(entry, error)
                else:
                    loop.succeeded(entry)

    A captured entry is open for dispatch. If one fails, earlier ones stay usable, and the memory of
    the failed one is freed. With ``eager_fallback`` its batches run eagerly and the walk goes on;
    otherwise ``failed`` raises "capturing ``describe(entry)`` failed". The dispatch tables are
    built at the end, so that the first batch does not wait for them.
    """

    def __init__(
        self,
        pool: GraphPool,
        dispatcher: Dispatcher,
        *,
        eager_fallback: bool,
        show_progress: bool,
        name: str,
        describe: Callable[[PlanEntry], str] = describe_entry,
    ) -> None:
        self.report = CaptureReport()
        self._pool = pool
        self._dispatcher = dispatcher
        self._eager_fallback = eager_fallback
        self._show_progress = show_progress
        self._name = name
        self._describe = describe
        self._capturing = pool.capturing()

    def __enter__(self) -> None:
        self._capturing.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._capturing.__exit__(*raised)
        self._dispatcher.build()

    def over(self, entries: Iterable[PlanEntry]) -> Iterator[PlanEntry]:
        """The entries in order, with a progress bar for each phase."""
        disable = not _shown(self._show_progress)
        for phase, group in itertools.groupby(entries, key=lambda entry: entry.phase):
            for entry in ProgressBar(list(group), desc=f"{self._name}: {phase}", disable=disable):
                pool = self._pool
                self._outer_error = sys.exception()
                self._start, self._serial_before = time.perf_counter(), pool.serial
                self._bytes_before, self._graphs_before = pool.num_bytes, pool.num_graphs_captured
                self._executables_before = pool.executable_bytes_captured
                yield entry

    def succeeded(self, entry: PlanEntry) -> None:
        pool = self._pool
        if pool.serial == self._serial_before:
            mode = entry.mode.name
            self.failed(
                entry,
                CaptureError(
                    f"the forward ran, but captured nothing: nothing in it is wrapped for {mode}, "
                    "so this size would always run eagerly (wrap the model or its pieces in "
                    f"CUDAGraphWrapper(..., CUDAGraphMode.{mode})), or its wrappers have captured "
                    "this key before, for another manager (give each manager wrappers of its own, "
                    "or clear_graphs() of the other one first)"
                ),
            )
            return
        self._dispatcher.mark_captured(entry)
        self._note(entry, pool.num_graphs_captured - self._graphs_before)

    def failed(self, entry: PlanEntry, error: BaseException) -> None:
        pool = self._pool
        taken = range(self._serial_before + 1, pool.serial + 1)
        if not isinstance(error, Exception):  # an interrupt: nothing to explain
            pool.discard(taken)
            raise error
        wrapped = _describe_failure(self._describe(entry), error)
        _drop_frames(error, until=self._outer_error)
        pool.discard(taken)
        pool.release_unused()
        if not self._eager_fallback:
            raise wrapped from error
        self._dispatcher.mark_refused(entry, Reason.CAPTURE_FAILED)
        logger.warning("%s; its batches will run eagerly", wrapped)
        self._note(entry, 0, str(wrapped))

    def _note(self, entry: PlanEntry, num_graphs: int, error: str | None = None) -> None:
        executables = self._pool.executable_bytes_captured - self._executables_before
        self.report.entries.append(
            EntryReport(
                entry=entry,
                num_graphs=num_graphs,
                num_bytes=self._pool.num_bytes - self._bytes_before,
                seconds=time.perf_counter() - self._start,
                error=error,
                executable_bytes=0 if error else executables,
            )
        )


def _drop_frames(error: BaseException | None, *, until: BaseException | None) -> None:
    """Drop the frames of a failed run, whose tensors would keep memory allocated.

    Errors that were being handled before the run (``until``) keep theirs.
    """
    seen: set[int] = set()  # `raise error from error` makes an error its own cause
    while error is not None and error is not until and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _describe_failure(entry: str, error: Exception) -> CaptureError:
    """The error to raise, with the failed run's traceback as text, since its frames are dropped."""
    described = _named_failure(entry, error)
    described.add_note("".join(traceback.format_exception(error)))
    return described


def _named_failure(entry: str, error: Exception) -> CaptureError:
    text = f"capturing {entry} failed: {_with_type(error)}"
    if isinstance(error, (CaptureOutOfMemoryError, MemoryError, torch.OutOfMemoryError)):
        return CaptureOutOfMemoryError(
            f"{text}. The graphs captured before it are usable; capture smaller sizes, or leave "
            "more memory for graphs"
        )
    operator = error.operator if isinstance(error, CaptureError) else None
    source = error.source if isinstance(error, CaptureError) else None
    return CaptureError(text, operator=operator, source=source)


def _with_type(error: Exception) -> str:
    """An error's text, after its type if it is not one of ours: a KeyError's text is just a key."""
    if isinstance(error, OstinatoError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(show_progress: bool) -> bool:
    """Whether this is the first rank, the only one that shows progress."""
    if not show_progress:
        return False
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0
