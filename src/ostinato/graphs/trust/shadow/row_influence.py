"""Finds the operator that makes a row depend on other rows of its batch.

Two eager runs of one step are compared that differ in other rows: padding, or other requests. A row
must come out the same, to the bit, with one exception: a mixture multiplies the rows of each expert
together, so the kernel, and with it the order of a sum, may follow from the other rows. The
difference is then one of rounding, which has a bound (``tolerance``).
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.graphs.trust.shadow.call_log import CallLog, LoggedCall, Made


class Influence(NamedTuple):
    """The operator by which other rows reach a row, and how much its results change."""

    operator: str
    max_difference: float


def first_influence(one: CallLog, other: CallLog) -> Influence | None:
    """The first operator whose rows differ between two runs, and where that comes from.

    Memory from outside the runs does not count: it also holds what was given differently.
    """
    # By call: how much it varies, even where its rows are not those of the batch.
    varies: list[float | None] = []
    of_rows: list[bool] = []
    for number, (mine, its) in enumerate(zip(one.calls, other.calls, strict=False)):
        if mine.operator != its.operator:
            return Influence(mine.operator, float("nan"))
        varies.append(_difference(mine, its))
        of_rows.append(any(value.of_rows for value in mine.own_results))
        if varies[-1] is not None and of_rows[-1]:
            return _origin(one.calls, number, varies, of_rows)
    return None


def _origin(
    calls: list[LoggedCall], number: int, varies: list[float | None], of_rows: list[bool]
) -> Influence:
    """What a call that varies has from outside its rows: a mean over the batch, for example."""
    for operand in calls[number].operands.values():
        maker = operand.call if isinstance(operand, Made) else number
        if maker < number and varies[maker] is not None and not of_rows[maker]:
            return _origin(calls, maker, varies, of_rows)
    off = varies[number]
    return Influence(calls[number].operator, float("nan") if off is None else off)


def _difference(mine: LoggedCall, its: LoggedCall) -> float | None:
    if mine.operator.startswith(("aten.empty", "aten.new_empty")):
        return None  # what the memory held before
    pairs = zip(mine.own_results, its.own_results, strict=False)
    found = [off for a, b in pairs if (off := a.difference_from(b)) is not None]
    return max(found, default=None)
