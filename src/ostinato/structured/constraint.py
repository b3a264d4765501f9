"""``Constraint``: follows one sequence through its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.quoting import said

if TYPE_CHECKING:
    from llguidance import LLMatcher

# One bit per token, the lowest of each word first; 1: the token may come next.
Mask: TypeAlias = npt.NDArray[np.int32]


class Constraint:
    """What one sequence may say next, after the tokens that ``follow`` has seen.

    ``ends``: a mask of the end-of-sequence tokens. They may come where the text may end, unless the
    request ignores them (``allows_end``): then the text goes on for as long as the grammar lets it.
    ``is_complete``: nothing but an end can follow. ``failure``: why it cannot go on, if it cannot.
    """

    def __init__(self, matcher: LLMatcher, ends: Mask, *, allows_end: bool) -> None:
        self._matcher = matcher
        self._ends = ends
        self._allows_end = allows_end
        self._num_seen = 0
        self.is_complete = False
        self.failure: str | None = None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the sequence so far; it may be shorter than the last time, but no other."""
        if self.failure is not None:
            return
        num_tokens = len(token_ids)
        if num_tokens < self._num_seen:
            self._matcher.rollback(self._num_seen - num_tokens)
            self.is_complete = False
        elif self.is_complete or num_tokens == self._num_seen:
            return  # what follows a complete text is its end
        else:
            self._matcher.consume_tokens(list(token_ids[self._num_seen :]))
            self.is_complete = self._matcher.is_stopped()
        self._num_seen = num_tokens
        self._check()

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next to ``mask``, contiguous, of all tokens of the model."""
        if self.failure is None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
        if self.failure is not None:
            mask.fill(-1)  # the engine ends the request once it has the next token
            return
        others = mask & ~self._ends
        if not others.any():
            self.is_complete = True
        elif not self._allows_end:
            mask[:] = others

    def _check(self) -> None:
        if self._matcher.is_error():
            self.failure = f"the grammar cannot go on: {said(self._matcher.get_error())}"
