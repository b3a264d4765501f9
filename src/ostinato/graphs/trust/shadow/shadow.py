"""Runs a step both ways: eagerly, undone, then by its graph; and compares what they leave.

Eager code runs the padded shape of the graph, so both launch the same kernels and every bit must
agree, in every dtype. Padding rows get other contents in the eager run: real rows must not depend
on them, beyond rounding (``row_influence``). If the bits differ, two more eager runs tell whether
eager code repeats itself. Only if it does not (a kernel that adds in the order of arrival) may the
graph differ, by a small multiple of the differences between eager runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.shadow.bisect import NameOf, SteppedReplay, explain
from ostinato.graphs.trust.shadow.call_log import CallLog, CallLogging
from ostinato.graphs.trust.shadow.differences import Difference, differing
from ostinato.graphs.trust.shadow.memory_part import (
    StepPart,
    compared,
    read_parts,
    write_parts,
)
from ostinato.graphs.trust.shadow.report import Cause, Finding, Mismatch, VerifyReport
from ostinato.graphs.trust.shadow.row_influence import Influence, first_influence
from ostinato.graphs.trust.shadow.tolerance import is_beyond, spread_of, within_rounding

logger = logging.getLogger(__name__)


def observe_captures(pool: GraphPool) -> None:
    """Have the tapes of later captures keep a log of their operators."""
    pool.new_observer = partial(CallLog, pool.backend.weak)


class EagerRun(Protocol):
    """Runs the step eagerly, in the graph's padded shape.

    ``other_padding``: with other contents in padding rows. ``logging`` is entered around the part
    that the graph contains, and paused where padding is written.
    """

    def __call__(
        self, *, other_padding: bool = False, logging: CallLogging | None = None
    ) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class ShadowedStep:
    """A step that can run both ways; both return their results by name, real rows only.

    ``graph``: its mode and key, for reports. ``tape``: what ``replay`` replays; None: not all that
    ``eager`` runs is on one tape, so where they part is not looked for. ``parts``: all memory that
    the step writes and that outlives it, in the order in which it is written.
    ``alone``: runs it eagerly without padding; None if it has none. ``rows``: of tensors inside the
    step, by their number of rows with padding, the real ones. ``num_grouping_layers``: in this many
    layers a row is multiplied together with others that the data choose, so that its rounding may
    depend on them. ``exact``: eager runs may not differ either, not even among themselves.
    """

    graph: str
    tape: Tape | None
    eager: EagerRun
    replay: Callable[[], Mapping[str, torch.Tensor]]
    parts: Sequence[StepPart]
    rows: Mapping[int, slice]
    num_grouping_layers: int = 0
    exact: bool = False
    alone: Callable[[], Mapping[str, torch.Tensor]] | None = None


class Shadow:
    """Compares steps of one ``pool``'s graphs, and keeps the ``report``.

    ``name_of`` names the memory at an address; ``ledger``, if given, says what graphs hold that has
    moved. ``agree``: whether any of the ranks that run the step together found a difference; all of
    them then look for it. None: there is one rank.
    """

    def __init__(
        self,
        pool: GraphPool,
        *,
        name_of: NameOf,
        ledger: Ledger | None = None,
        agree: Callable[[bool], bool] | None = None,
        report: VerifyReport | None = None,
    ) -> None:
        self.report = VerifyReport() if report is None else report
        self.pool = self._pool = pool
        self._name_of = name_of
        self._ledger = ledger
        self._ranks = agree is not None
        self._agree = agree or bool
        observe_captures(pool)

    def run(self, step: ShadowedStep, found: str) -> Mismatch | None:
        """Run ``step`` both ways. It takes effect once, as in eager code if the two differ.

        ``found`` says when, for the report. Synchronises. The results are where the graph leaves
        them, and valid as long.
        """
        before: dict[str, torch.Tensor] | None = None
        try:
            before = read_parts(step.parts)
            want = self._eager(step, other_padding=True)
        except torch.OutOfMemoryError as error:
            self._skip(step, before, error)
            return None
        write_parts(step.parts, before)
        result = self._replay(step)
        got = {**compared(step.parts, read_parts(step.parts)), **_cloned(result)}
        self.report.num_compared += 1
        differences = differing(got, want)
        if not self._agree(bool(differences)):
            return None
        write_parts(step.parts, before)
        finding = self._finding(step, before, got, want)
        if finding is None:  # eager code itself gives other bits every time
            self._run_again(step, before, result, partial(self._replay, step))
            return None
        mismatch = self._reported(_mismatch(step, found, differences, finding))
        truth = step.eager if finding.cause is not Cause.PADDING else (step.alone or step.eager)
        with self._pool.backend.capture_scope():
            self._run_again(step, before, result, truth)
        return mismatch

    def _skip(
        self,
        step: ShadowedStep,
        before: Mapping[str, torch.Tensor] | None,
        error: torch.OutOfMemoryError,
    ) -> None:
        """Run the step by its graph alone: there is no memory for an eager run beside it."""
        if self._ranks:
            raise error  # the others are waiting in its collectives
        if before is not None:
            write_parts(step.parts, before)
        self._replay(step)
        self.report.num_skipped += 1
        logger.warning("%s was not compared with eager: %s", step.graph, error)

    # --- both ways -----------------------------------------------------------------------------

    def _replay(self, step: ShadowedStep) -> Mapping[str, torch.Tensor]:
        """Replay the step; what runs eagerly between its graphs, as in an eager run."""
        has_eager_parts = step.tape is None or step.tape.has_breaks
        with self._pool.backend.capture_scope() if has_eager_parts else nullcontext():
            return step.replay()

    def _eager(
        self,
        step: ShadowedStep,
        *,
        other_padding: bool,
        logging: CallLogging | None = None,
    ) -> dict[str, torch.Tensor]:
        """What an eager run leaves: the parts that are compared, then its results."""
        # On the capture's stream cuBLAS has the workspace that it had then, and chooses the same
        # kernels.
        with self._pool.backend.capture_scope():
            result = _cloned(step.eager(other_padding=other_padding, logging=logging))
        return {**compared(step.parts, read_parts(step.parts)), **result}

    def _run_again(
        self,
        step: ShadowedStep,
        before: Mapping[str, torch.Tensor],
        result: Mapping[str, torch.Tensor],
        run: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Undo all, and run the step for good; its results go where the graph leaves them."""
        write_parts(step.parts, before)
        truth = _cloned(run())
        for name, tensor in result.items():
            tensor.copy_(truth[name])

    # --- where they part -----------------------------------------------------------------------

    def _finding(
        self,
        step: ShadowedStep,
        before: Mapping[str, torch.Tensor],
        got: Mapping[str, torch.Tensor],
        want: Mapping[str, torch.Tensor],
    ) -> Finding | None:
        """Why they differ; None if eager runs differ among themselves as much."""
        logged = self._logged(step, before, other_padding=True)
        again = self._logged(step, before, other_padding=True)
        spread = {} if step.exact else spread_of([want, logged[1], again[1]])
        if self._agree(bool(spread)) and not self._agree(is_beyond(got, want, spread)):
            self._note_inexact(step, first_influence(logged[0], again[0]))
            return None
        same_padding, left = self._logged(step, before, other_padding=False)
        if not self._agree(bool(differing(got, left))):
            influence = first_influence(same_padding, logged[0])
            rounded = within_rounding(got, want, step.num_grouping_layers, same_padding)
            return self._rows_finding(step, Cause.PADDING, influence, rounded=rounded)
        return self._parted(step, before, same_padding)

    def _parted(
        self, step: ShadowedStep, before: Mapping[str, torch.Tensor], eager: CallLog
    ) -> Finding:
        """Where the graph and the logged eager run, which had the same padding, part."""
        if step.tape is None:
            return Finding(cause=Cause.OTHER_RESULT)
        write_parts(step.parts, before)
        replayed = SteppedReplay(step.tape, eager, step.rows)
        with replayed.instead():
            self._replay(step)
        finding = explain(step.tape, eager, replayed, self._name_of)
        # Kernels that are launched around torch's dispatcher are in no log.
        stale = self._ledger.stale_in(step.tape) if self._ledger is not None else []
        if not stale or finding.cause is Cause.MOVED_MEMORY:
            return finding
        first, node = stale[0], stale[0].node
        return Finding(
            cause=Cause.MOVED_MEMORY,
            segment=node.piece if node is not None else None,
            operator=(node.operator or node.name) if node is not None else None,
            detail=f"{first.owner} at {first.address:#x} is {first.why}",
        )

    def _logged(
        self,
        step: ShadowedStep,
        before: Mapping[str, torch.Tensor],
        *,
        other_padding: bool,
        rows: Mapping[int, slice] | None = None,
    ) -> tuple[CallLog, dict[str, torch.Tensor]]:
        """An eager run with a log of its operators, and what it leaves."""
        write_parts(step.parts, before)
        split = step.tape is not None and step.tape.has_breaks
        logging = CallLogging(self._pool.device.type, rows or step.rows, split_at_breaks=split)
        left = self._eager(step, other_padding=other_padding, logging=logging)
        return logging.log, left

    # --- rows of one batch ---------------------------------------------------------------------

    def check_row(
        self,
        step: ShadowedStep,
        change_others: AbstractContextManager[Any],
        rows: Mapping[int, slice],
        found: str,
    ) -> Mismatch | None:
        """Replay twice, then with ``change_others``: the ``rows`` must come out the same.

        ``rows``: one entry, of results and of tensors inside the step that have as many rows as
        its key. The step leaves no effects.
        """
        before, first = self._replayed(step, rows)
        with change_others:
            before_others, second = self._replayed(step, rows)
            differences = differing(second, first)
            if not self._agree(bool(differences)):
                return None
            changed = self._logged(step, before_others, other_padding=False, rows=rows)[0]
            write_parts(step.parts, before_others)
        as_before = self._logged(step, before, other_padding=False, rows=rows)[0]
        write_parts(step.parts, before)
        influence = first_influence(as_before, changed)
        rounded = within_rounding(second, first, step.num_grouping_layers, as_before)
        finding = self._rows_finding(step, Cause.BATCH, influence, rounded=rounded)
        if finding is None:
            return None
        return self._reported(_mismatch(step, found, differences, finding))

    def _replayed(
        self, step: ShadowedStep, rows: Mapping[int, slice]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parts before a replay that is undone, and ``rows`` of its results."""
        before = read_parts(step.parts)
        (kept,) = rows.values()
        results = {name: tensor[kept].clone() for name, tensor in self._replay(step).items()}
        write_parts(step.parts, before)
        return before, results

    def _rows_finding(
        self, step: ShadowedStep, cause: Cause, influence: Influence | None, *, rounded: bool
    ) -> Finding | None:
        """How other rows reach a row; None if they only change how it is ``rounded``."""
        if not self._agree(not rounded):
            self._note_inexact(step, influence)
            return None
        if influence is None:
            return Finding(cause=cause)
        detail = f"its results change by up to {influence.max_difference:.3g}"
        return Finding(cause=cause, operator=influence.operator, detail=detail)

    def _note_inexact(self, step: ShadowedStep, influence: Influence | None) -> None:
        self.report.num_inexact += 1
        name = "unknown" if influence is None else influence.operator
        self.report.inexact[step.graph] = name

    def _reported(self, mismatch: Mismatch) -> Mismatch:
        self.report.mismatches.append(mismatch)
        logger.error("%s; it runs eagerly from now on", mismatch)
        return mismatch


def _mismatch(
    step: ShadowedStep, found: str, differences: Sequence[Difference], finding: Finding
) -> Mismatch:
    if not differences:  # only another rank found one
        return Mismatch(
            graph=step.graph,
            found=f"{found}, on another rank",
            tensor="nothing here",
            max_difference=0.0,
            finding=finding,
        )
    first = differences[0]
    return Mismatch(
        graph=step.graph,
        found=found,
        tensor=first.name,
        max_difference=first.max_difference,
        finding=finding,
    )


def _cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
