"""Which graphs are trusted with which numbers of rows, and what their trials have shown so far."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ostinato.graphs.capture.call_layout import CallLayout
from ostinato.graphs.trust.trial import Trial, differs

logger = logging.getLogger(__name__)

# How often to retry a graph whose results are close to an eager call's but not equal.
_MOST_UNCLEAR = 8
# Trials of one number of rows after which it is trusted, even if all rows in each were alike.
_ENOUGH_TRIALS = 3


class TrialRecord:
    """Decides after each trial whether the graph needs another with this number of rows.

    A trial proves little if confusing two rows, or a row and padding, would not show, or if the
    batch is the one that the graph was captured with: what a capture fixed by mistake is right for
    that batch.
    """

    def __init__(self, layout: CallLayout) -> None:
        self._layout = layout
        self.trusted: set[tuple[int, int]] = set()  # (size, rows)
        self._trials: Counter[tuple[int, int]] = Counter()
        self._unclear: Counter[tuple[int, int]] = Counter()
        # By size, the contents of the batch of its capture, until another one was tried.
        self._captured_with: dict[int, tuple[int, ...]] = {}

    def captured(self, size: int, values: Sequence[Any]) -> None:
        """Note the batch that a size is captured with."""
        self._captured_with[size] = self._layout.fingerprint(values)

    def unclear(self, rows: int, size: int) -> None:
        """Note a result that rounding may explain; raise if that is so again and again."""
        self._unclear[size, rows] += 1
        if self._unclear[size, rows] > _MOST_UNCLEAR:
            raise differs("the result", f"as in {_MOST_UNCLEAR} calls before", rows, size)

    def passed(self, rows: int, size: int, trial: Trial) -> None:
        """Note a trial without a difference."""
        key, values = (size, rows), trial.values
        if rows < size and not self._layout.differs_from_padding(values):
            if key not in self._trials:
                logger.warning(
                    "all rows in a batch of %d equal the padding, so comparing the batch with an "
                    "eager call proves little; such batches are compared every time",
                    rows,
                )
            self._trials.setdefault(key, 0)  # warn once
            return
        self._trials[key] += 1
        often = self._trials[key] >= _ENOUGH_TRIALS
        if not often and self._captured_with.get(size) == self._layout.fingerprint(values):
            return
        self._captured_with.pop(size, None)
        if (
            rows == size
            or often
            or trial.draws_random_numbers
            or self._layout.has_distinct_rows(values)
        ):
            self.trusted.add(key)

    def clear(self) -> None:
        """Forget all trials: the graphs are gone."""
        self.trusted.clear()
        self._trials.clear()
        self._unclear.clear()
        self._captured_with.clear()
