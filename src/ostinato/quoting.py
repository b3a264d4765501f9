"""Quotes arbitrary values and other libraries' errors in messages: short and on one line."""

from __future__ import annotations

import reprlib

_LONGEST = 160
_LONGEST_SAID = 300
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80


def shown(value: object) -> str:
    """``value`` for an error message, even if its ``repr`` misbehaves."""
    try:
        return _one_line(_shorten.repr(value))
    except ValueError:  # repr() of an integer with thousands of digits raises
        return f"an object of type {type(value).__name__}"


def said(error: BaseException | str) -> str:
    """The text of another library's ``error``, shortened; such messages can quote whole files."""
    try:
        text = str(error)
    except Exception:  # a custom class with a broken __str__
        text = ""
    text = _one_line(text[: 2 * _LONGEST_SAID], _LONGEST_SAID)
    return text or ("" if isinstance(error, str) else type(error).__name__)


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` comes from a library: an Exception, or a panic from Rust code."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def listed(names: list[str]) -> str:
    """The first three of ``names``, and how many more there are."""
    first = ", ".join(
        name if name.isprintable() and 0 < len(name) <= _LONGEST else shown(name)
        for name in names[:3]
    )
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _one_line(text: str, longest: int = _LONGEST) -> str:
    # A terminal interprets control characters, and surrogates cannot be printed at all.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 3] + "..."
