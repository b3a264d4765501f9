"""Prompts as text, for servers that take no token ids.

Words that nearly every tokenizer has as one token, with a space before them: a prompt has about as
many tokens as words. What a server counted is in its answer.
"""

from __future__ import annotations

from collections.abc import Sequence

_TEXT = (
    "the of and to in is that for it with as on be at by this have from or one had not but what "
    "all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no "
    "make than first been its who now people my made over did down only way find use may water "
    "long little very after words called just where most know"
)
_WORDS = _TEXT.split()

VOCABULARY = len(_WORDS)


def as_text(token_ids: Sequence[int]) -> str:
    """The text of a prompt that was drawn from a vocabulary of ``VOCABULARY`` tokens."""
    return " ".join(_WORDS[token] for token in token_ids)
