"""Closing several things: each of them, whatever another one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def close_each(steps: Iterable[Callable[[], object]]) -> None:
    """Call all steps, in order; the first error that one raised is raised when all have run."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
