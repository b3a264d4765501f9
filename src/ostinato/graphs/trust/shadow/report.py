"""What shadow runs found: how many steps were compared, and each mismatch, named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Cause(Enum):
    """Why a graph and an eager run differ, as far as it can be told."""

    MOVED_MEMORY = "the graph uses memory that eager code no longer uses"
    HOST_VALUE = "a host value is fixed in the graph, and eager code has another one now"
    OTHER_OPERATORS = "eager code runs other operators now than at the capture"
    PADDING = "padding rows change the results of real rows"
    BATCH = "a row's results depend on the other rows of the batch"
    OTHER_RESULT = "the same operators, called alike, gave another result in the graph"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where two runs part: the first operator that differs, and in which graph of a tape.

    ``segment``: counts the graphs between eager breaks from 0; None if there is one, or if it is
    not known. ``operator``: None if the device does not tell. ``detail``: what differs about it.
    """

    cause: Cause
    segment: int | None = None
    operator: str | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A graph that differed from an eager run, and was quarantined.

    ``graph``: its mode and key. ``found``: when. ``tensor``: the first that differs, of those that
    the step leaves, and ``max_difference`` how much it does at most. ``finding``: where the runs
    part.
    """

    graph: str
    found: str
    tensor: str
    max_difference: float
    finding: Finding

    def __str__(self) -> str:
        finding = self.finding
        segment = "" if finding.segment is None else f" in segment {finding.segment}"
        operator = "" if finding.operator is None else f", first at {finding.operator}{segment}"
        if finding.operator is None and segment:
            operator = f", first{segment}"
        detail = f" ({finding.detail})" if finding.detail else ""
        return (
            f"{self.graph} differs from eager ({self.found}): {self.tensor} by up to "
            f"{self.max_difference:.3g}; {finding.cause.value}{operator}{detail}"
        )


@dataclass
class VerifyReport:
    """Counts of comparisons since the start, on this rank.

    ``num_compared``: graphs and steps that ran both ways. ``num_inexact``: those of them in which
    eager runs differ among themselves, or a mixture rounds rows differently beside other rows, so
    that only larger differences count; ``inexact`` names the first operator of each that does it.
    ``num_skipped``: steps that could not run eagerly as well, for lack of memory. ``mismatches``:
    quarantined graphs.
    """

    num_compared: int = 0
    num_inexact: int = 0
    num_skipped: int = 0
    inexact: dict[str, str] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def quarantined(self) -> Sequence[str]:
        """The graphs that run eagerly from now on."""
        return [each.graph for each in self.mismatches]
