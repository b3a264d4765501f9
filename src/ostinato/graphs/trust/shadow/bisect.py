"""Finds where a graph and an eager run of the same step first differ.

Two sources are joined. The log of the capture and the log of an eager run show the first call that
differs in an address, a value or its operator: on every device. Replaying the tape in steps shows
the first result that differs: after every operator on the CPU; on CUDA, whose graphs run whole,
after every segment of a tape with breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ostinato.graphs.backends.cpu.backend import CpuGraph
from ostinato.graphs.capture.segments import EagerCall, Tape
from ostinato.graphs.tree import tensors_in
from ostinato.graphs.trust.shadow.call_log import CallLog, Given, LoggedCall
from ostinato.graphs.trust.shadow.kept_value import KeptValue
from ostinato.graphs.trust.shadow.report import Cause, Finding

# The name of the memory at an address; None if it has none.
NameOf = Callable[[int], str | None]


class _Place(NamedTuple):
    """A result that differs: of a call of the logs, or at the end of a segment (call None)."""

    call: int | None
    segment: int
    max_difference: float
    operator: str


class SteppedReplay:
    """Replays a tape in steps and compares each with ``eager``, a log with values.

    It runs to the end even after a difference: other ranks may wait in a collective there.
    """

    def __init__(self, tape: Tape, eager: CallLog, rows: Mapping[int, slice]) -> None:
        self.first: _Place | None = None
        self._tape = tape
        self._eager = eager
        self._rows = rows
        self._captured = tape.log.calls if isinstance(tape.log, CallLog) else []

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, replays of the tape are stepped."""
        whole, self._tape.replay = self._tape.replay, self._run
        try:
            yield
        finally:
            self._tape.replay = whole

    def _run(self) -> None:
        num_breaks, graphs = 0, iter(_segments_with_steps(self._captured))
        for step in self._tape.steps:
            if isinstance(step, EagerCall):
                step.replay()
                self._compare_break(step, num_breaks)
                num_breaks += 1
            elif isinstance(step, CpuGraph):
                segment = next(graphs, -1)
                step.replay_in_steps(partial(self._compare_step, segment))
            else:
                step.replay()

    def _compare_step(self, segment: int, num_steps: int) -> None:
        if self.first is not None:
            return
        for number, call in enumerate(self._captured):
            if (call.segment, call.num_steps) != (segment, num_steps):
                continue
            before = self._captured[number - 1] if number else None
            if before is not None and (before.segment, before.num_steps) == (segment, num_steps):
                continue  # memory that holds nothing yet
            if number >= len(self._eager.calls):
                return
            theirs = self._eager.calls[number]
            self._compare(call.results, theirs.results, number, segment, call.operator)

    def _compare_break(self, step: EagerCall, number: int) -> None:
        if self.first is None and number < len(self._eager.breaks):
            mine = tuple(tensors_in(step.arguments))
            self._compare(mine, self._eager.breaks[number], None, number, step.name)

    def _compare(
        self,
        mine: Sequence[Any],
        theirs: Sequence[KeptValue],
        call: int | None,
        segment: int,
        operator: str,
    ) -> None:
        for tensor, kept in zip(mine, theirs, strict=False):
            off = KeptValue.of(tensor, self._rows).difference_from(kept)
            if off is not None:
                self.first = _Place(call, segment, off, operator)
                return


def _segments_with_steps(calls: Sequence[LoggedCall]) -> list[int]:
    """The segments that have a graph: recordings without steps leave none."""
    return sorted({call.segment for call in calls if call.num_steps})


def explain(tape: Tape, eager: CallLog, replayed: SteppedReplay, name_of: NameOf) -> Finding:
    """Where the tape and the eager run part, and why."""
    captured = tape.log.calls if isinstance(tape.log, CallLog) else []
    place = replayed.first
    split = tape.has_breaks
    for number, (was, now) in enumerate(zip(captured, eager.calls, strict=False)):
        found = _other_call(was, now, name_of)
        if found is not None:
            cause, detail = found
            segment = was.segment if split else None
            return Finding(cause=cause, segment=segment, operator=was.operator, detail=detail)
        if place is not None and place.call == number:
            break
    if captured and place is None and len(captured) != len(eager.calls):
        counts = f"{len(captured)} at the capture, {len(eager.calls)} now"
        return Finding(cause=Cause.OTHER_OPERATORS, detail=counts)
    if place is None:
        return Finding(cause=Cause.OTHER_RESULT)
    named = place.operator if place.call is not None else f"the arguments of {place.operator}"
    return Finding(
        cause=Cause.OTHER_RESULT,
        segment=place.segment if split else None,
        operator=named,
        detail=f"its result differs by up to {place.max_difference:.3g}",
    )


def _other_call(was: LoggedCall, now: LoggedCall, name_of: NameOf) -> tuple[Cause, str] | None:
    """How the call of an eager run differs from the call at the capture; None if it does not."""
    if was.operator != now.operator:
        return Cause.OTHER_OPERATORS, f"eager code runs {now.operator} there"
    for name, mine in was.operands.items():
        its = now.operands.get(name)
        if isinstance(mine, Given) and isinstance(its, Given):
            if mine.address != its.address:
                owner = name_of(its.address) or "a tensor"
                return Cause.MOVED_MEMORY, (
                    f"{name} is {owner}, at {its.address:#x} now and at {mine.address:#x} in the "
                    "graph"
                )
            if mine == its:
                continue
        if isinstance(mine, tuple) or isinstance(its, tuple):
            if mine != its:
                return Cause.OTHER_OPERATORS, f"{name} is another tensor"
        elif not _same_value(mine, its):
            return Cause.HOST_VALUE, f"{name} is {its!r} now and {mine!r} in the graph"
    return None


def _same_value(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)
