"""``Constraint``: follows one sequence through its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.quoting import said

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# One bit per token, the lowest of each word first; 1: the token may come next.
Mask: TypeAlias = npt.NDArray[np.int32]


class Constraint:
    """What one sequence may say next, after the tokens that ``follow`` has seen.

    ``ends``: a mask of the end-of-sequence tokens. They may come where the text may end, unless the
    request ignores them (``allows_end``): then the text goes on for as long as the grammar lets it.
    ``is_complete``: nothing but an end can follow. ``failure``: why it cannot go on, if it cannot.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        executor: LLExecutor,
        ends: Mask,
        *,
        allows_end: bool,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._executor = executor
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

    @staticmethod
    def fill(constraints: Sequence[Constraint], masks: Mask) -> None:
        """Write which tokens may come next in each sequence to a row of ``masks``, contiguous.

        llguidance computes them side by side, in threads of its own.
        """
        rows = [
            (each._matcher, row) for row, each in enumerate(constraints) if each.failure is None
        ]
        if rows:
            executor, (count, width) = constraints[0]._executor, masks.shape
            executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * width, count)
        for each, mask in zip(constraints, masks, strict=True):
            each._finish(mask)

    def _finish(self, mask: Mask) -> None:
        """Make of the matcher's mask what this request may sample."""
        if self.failure is None:
            self._correct(mask)
            self._check()
        if self.failure is not None:
            mask.fill(-1)  # the engine ends the request once it has the next token
            return
        others = mask & ~self._ends
        if not others.any():
            self.is_complete = True
        elif not self._allows_end:
            mask[:] = others

    def _correct(self, mask: Mask) -> None:
        """Replace a single token that the matcher would not take.

        Where the next text is forced, llguidance (1.9) proposes the tokens of that text, also an
        added token such as <tool_call>, which it does not take for the text of its name.
        """
        (words,) = mask.nonzero()
        if len(words) != 1 or (bits := int(mask[words[0]]) & 0xFFFFFFFF).bit_count() != 1:
            return
        token = int(words[0]) * 32 + bits.bit_length() - 1
        if self._matcher.is_stopped() or self._matcher.validate_tokens([token]):
            return
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        for token in self._tokenizer.greedy_tokenize(text)[:1]:
            mask[words[0]] = 0
            mask.view(np.uint32)[token // 32] = 1 << token % 32

    def _check(self) -> None:
        if self._matcher.is_error():
            self.failure = f"the grammar cannot go on: {said(self._matcher.get_error())}"
