"""Incremental detokenization, with stop strings.

Text is returned only once it is final: not in the middle of a character, and not while it may
still become a stop string.

Why not ``tokenizers.decoders.DecodeStream``: it holds back everything as long as the text ends in
half a character, which garbage can do for ever, and has no way to release that at the end: it did
so at the end of 249 of 300 random sequences of byte tokens. It would be faster (some 2 µs per token
against 80). Tokenizers written in Python have none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.errors import RequestFailedError
from ostinato.quoting import is_failure, said, shown
from ostinato.sampling_params import SamplingParams
from ostinato.text.stop_strings import StopStrings, stop_strings

_SPACE = "\u2581"  # how pieces of SentencePiece write a space
_INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character
_LONGEST_CHARACTER = 4  # bytes, and so tokens
# At least this many tokens are decoded again with every new one: text can depend on the tokens
# before it (some tokenizers drop a leading space).
_CONTEXT = 8


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token, with the spaces it begins with, as in the middle of a text.

    Decoders of SentencePiece drop the first space of all they decode, so that " the" and "the"
    would look the same.
    """
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(piece, str) or not piece.startswith(_SPACE) or _SPACE in text:
        return text
    num_spaces = len(piece) - len(piece.lstrip(_SPACE))
    return " " * num_spaces + text.lstrip(" ")


class Detokenizer:
    """The text of one completion.

    ``text`` can be shown; it only grows. ``add`` returns the stop string that ended it, if any.
    ``num_read``: tokens taken from the list given to ``read``.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._params = params
        self._skip_special_tokens = params.skip_special_tokens
        self._stop = stop_strings(tuple(params.stop)) if params.stop else None
        self._state = 0  # of the search for stop strings
        self._include_stop = params.include_stop_str_in_output
        self.num_read = 0
        self._decoded = ""  # all final text, stop strings or not
        self._window: list[int] = []  # the last tokens, which are decoded again with each new one
        self._taken = 0  # characters of the window's text that are in _decoded
        self._cut = 0  # where the window will be cut once enough follows
        self._unfinished = 0  # tokens since the text last ended in a whole character

    def anew(self) -> Detokenizer:
        """One for the same text that has read nothing yet."""
        return Detokenizer(self._tokenizer, self._params)

    def read(self, token_ids: Sequence[int], min_tokens: int = 0) -> str | None:
        """Take the tokens added to ``token_ids`` since the last read.

        A stop string counts if the token that completes it is at least the ``min_tokens``-th.
        """
        if self._stop is None and len(token_ids) - self.num_read > 1:
            self._add_together(token_ids[self.num_read :])
        for number in range(self.num_read, len(token_ids)):
            self.num_read = number + 1
            found = self.add(token_ids[number], check_stop=number + 1 >= min_tokens)
            if found is not None:
                return found
        return None

    def add(self, token_id: int, *, check_stop: bool) -> str | None:
        """Take the next token. Only a stop string that a checked token completes is found."""
        self._window.append(token_id)
        before = len(self._decoded)
        self._decode()
        if self._stop is None:
            self.text = self._decoded
            return None
        found = self._find_stop(self._stop, before, check_stop)
        if found is None:
            held_back = self._stop.num_held_back(self._state)
            self.text = self._decoded[: len(self._decoded) - held_back]
        return found

    def _add_together(self, token_ids: Sequence[int]) -> None:
        """Take several tokens by one decoding, if they end in a whole character; else none."""
        text = self._decode_ids([*self._window, *token_ids])
        if text.endswith(_INCOMPLETE):
            return  # how long a character has been unfinished is found token by token
        self.num_read += len(token_ids)
        self._window += token_ids
        self._decoded += text[self._taken :]
        self.text = self._decoded
        self._taken, self._unfinished = len(text), 0
        if len(self._window) - self._cut >= _CONTEXT:
            self._shorten(num_waiting=0)

    def finish(self) -> None:
        """End the text: release all that was held back, including half a character."""
        self._decoded += self._decode_ids(self._window)[self._taken :]
        self._window, self._taken = [], 0
        self.text = self._decoded

    def _decode(self) -> None:
        """Move final text from the window to ``_decoded``."""
        text = self._decode_ids(self._window)
        end = len(text)
        if not text.endswith(_INCOMPLETE):
            self._unfinished = 0
        else:
            self._unfinished += 1
            # Tokenizers make one or several marks of half a character, so all of them wait. If that
            # takes too long they are marks of garbage, and only the last can become a character.
            waiting = self._unfinished < _LONGEST_CHARACTER
            end = len(text.rstrip(_INCOMPLETE)) if waiting else len(text) - 1
        self._decoded += text[self._taken : end]
        self._taken = max(self._taken, end)
        enough = len(self._window) - self._cut >= _CONTEXT
        if enough and (not self._unfinished or self._unfinished >= _LONGEST_CHARACTER):
            self._shorten(num_waiting=len(text) - self._taken)

    def _shorten(self, num_waiting: int) -> None:
        """Cut the window between two characters, if what is left has text to be a context."""
        tail = self._window[self._cut :]
        text = self._decode_ids(tail)
        if num_waiting and len(text) < _LONGEST_CHARACTER:
            return  # garbage may be cut anywhere, as long as it ends in a character of its own
        # Tokens without text (special ones) give no context; the text before them still does.
        self._window = tail if text else self._window[: self._cut]
        self._cut = len(self._window)
        self._taken = len(self._decode_ids(self._window)) - num_waiting

    def _decode_ids(self, token_ids: list[int]) -> str:
        try:
            text: str = self._tokenizer.decode(
                token_ids,
                skip_special_tokens=self._skip_special_tokens,
                # It would remove spaces that were shown already.
                clean_up_tokenization_spaces=False,
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestFailedError(
                f"the model's tokenizer cannot decode token ids {shown(token_ids)}: {said(error)}; "
                "if it lacks one that the model has, forbid it with logit_bias"
            ) from error
        return text

    def _find_stop(self, stop: StopStrings, before: int, check: bool) -> str | None:
        """The stop string that ends first in the new text, which is cut off unless included.

        The search goes character by character, so the result does not depend on how the text was
        split into tokens. Of two that end together the longer counts.
        """
        state = self._state
        for position in range(before, len(self._decoded)):
            state = stop.step(state, ord(self._decoded[position]))
            found = stop.found(state) if check else None
            if found is not None:
                end = position + 1
                self.text = self._decoded[: end if self._include_stop else end - len(found)]
                self._decoded = self.text
                self._window, self._taken = [], 0
                return found
        self._state = state
        return None
