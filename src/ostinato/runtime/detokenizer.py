"""Tokens to text, as they come, with stop strings.

Text is handed out only once it is final: not in the middle of a character, and not while it might
still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.runtime.sampling_params import SamplingParams

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character
_LONGEST_CHARACTER = 4  # bytes; more tokens than that are not one character any more
# Tokens whose text can change with what follows: a few bytes of one character, and the space that
# some tokenizers drop at the beginning.
_CONTEXT = 6


class Detokenizer:
    """The text of one completion.

    ``text`` is what can be shown. ``add`` returns the stop string that ended it, if one did.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._stop: Sequence[str] = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._held_back = max((len(stop) for stop in self._stop), default=1) - 1
        self._token_ids: list[int] = []
        self._decoded = ""  # all text so far, whole characters only
        self._context_start = 0  # tokens from here on are decoded again with each new one
        self._context_end = 0  # tokens up to here are in _decoded

    def add(self, token_id: int, *, check_stop: bool) -> str | None:
        self._token_ids.append(token_id)
        before = len(self._decoded)
        self._decode()
        if check_stop:
            found = self._find_stop(before)
            if found is not None:
                return found
        self.text = self._decoded[: len(self._decoded) - self._held_back]
        return None

    def finish(self) -> None:
        """Nothing more comes: hand out what was held back, half a character included."""
        if self._context_end < len(self._token_ids):
            self._decoded += self._decode_since(self._context_start)[len(self._context_text()) :]
            self._context_end = len(self._token_ids)
        self.text = self._decoded

    def _decode(self) -> None:
        text = self._decode_since(self._context_start)
        pending = len(self._token_ids) - self._context_end
        if text.endswith(_INCOMPLETE) and pending < _LONGEST_CHARACTER:
            return
        self._decoded += text[len(self._context_text()) :]
        self._context_end = len(self._token_ids)
        self._context_start = max(self._context_start, self._context_end - _CONTEXT)

    def _context_text(self) -> str:
        return self._decode_range(self._context_start, self._context_end)

    def _decode_since(self, start: int) -> str:
        return self._decode_range(start, len(self._token_ids))

    def _decode_range(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens
        )
        return text

    def _find_stop(self, before: int) -> str | None:
        """The stop string that begins first in the new text, cut off unless it is wanted."""
        start = max(before - self._held_back, 0)
        hits = [
            (position, -len(stop), stop)
            for stop in self._stop
            if (position := self._decoded.find(stop, start)) >= 0
        ]
        if not hits:
            return None
        position, _, stop = min(hits)
        self._decoded = self._decoded[: position + (len(stop) if self._include_stop else 0)]
        self._token_ids = []
        self._context_start = self._context_end = 0
        self.text = self._decoded
        return stop
