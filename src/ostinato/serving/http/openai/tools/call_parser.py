"""``CallParser``: reads tool calls out of a text that comes in parts.

Text is passed on as soon as its kind is clear: content, the name of a call, a part of
its arguments. Text that turns out to be no call is content: nothing is lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ostinato.serving.http.openai.tools.call_format import CallFormat

_SPACE = " \t\r\n"
_BETWEEN = _SPACE + ";"  # what may be between calls
_STRING = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    name: str


@dataclass(frozen=True)
class Arguments:
    """A part of the arguments of the last call that started: JSON text."""

    text: str


Part = Content | CallStart | Arguments


class _Where(Enum):
    TEXT = 0  # outside calls
    HEAD = 1  # in a call, before its arguments
    ARGUMENTS = 2
    TAIL = 3  # in a call, behind its arguments


class CallParser:
    """Reads one answer; for calls without an opening, one that begins with a brace is a call."""

    def __init__(self, form: CallFormat) -> None:
        self._opening, self._closing = form.opening, form.closing
        self._where = _Where.TEXT
        self._text = ""  # that has come, and is not clear yet
        self._value = _JsonEnd()
        self._has_calls = False
        self._has_content = False  # without an opening, no call comes after other text
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        """Take in the next text; what is clear by now."""
        self._text += text
        steps = {
            _Where.TEXT: self._read_text,
            _Where.HEAD: self._read_head,
            _Where.ARGUMENTS: self._read_arguments,
            _Where.TAIL: self._read_tail,
        }
        while steps[self._where]():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """What is left at the end of the text."""
        if self._where is _Where.HEAD:
            self._end_of_head(self._text)
        elif self._where is _Where.TEXT:
            self._add_content(self._text)
        self._text = ""
        parts, self._parts = self._parts, []
        return parts

    # Each reads what it can, and returns whether another should go on.

    def _read_text(self) -> bool:
        if not self._opening:
            return self._read_bare()
        before, found, after = self._text.partition(self._opening)
        if not found:
            held = _common_end(before, self._opening)
            self._text = before[len(before) - held :]
            self._add_content(before[: len(before) - held])
            return False
        self._add_content(before)
        self._text, self._where = after, _Where.HEAD
        return True

    def _read_bare(self) -> bool:
        start = self._text.lstrip(_BETWEEN if self._has_calls else _SPACE)
        if not self._has_content and (not start or start[0] == "{"):
            if not start:
                return False  # it may yet be either
            self._text, self._where = start, _Where.HEAD
            return True
        self._add_content(self._text)
        self._text = ""
        return False

    def _read_head(self) -> bool:
        match = _HEAD.match(self._text)
        if match is not None:
            self._add_call(json.loads(match[1], strict=False))
            self._text, self._where = self._text[match.end() :], _Where.ARGUMENTS
            self._value = _JsonEnd()
            return True
        if not self._closing:  # another object, or an order of keys that only its end tells
            return False
        body, found, after = self._text.partition(self._closing)
        if not found:
            return False
        self._end_of_head(body, found)
        self._text, self._where = after, _Where.TEXT
        return True

    def _end_of_head(self, body: str, closing: str = "") -> None:
        """A whole call whose head was not as expected, or no call at all."""
        call = _call_in(body)
        if call is None:
            self._add_content(self._opening + body + closing)
        else:
            self._add_call(call[0])
            self._parts.append(Arguments(call[1]))

    def _read_arguments(self) -> bool:
        end = self._value.find(self._text)
        if self._text[:end]:
            self._parts.append(Arguments(self._text[:end]))
        self._text = self._text[end:]
        if not self._value.has_ended:
            return False
        self._where = _Where.TAIL
        self._value = _JsonEnd(depth=1)  # the call's own object, which may have other keys
        return True

    def _read_tail(self) -> bool:
        if self._closing:
            _, found, after = self._text.partition(self._closing)
            if not found:
                return False
        else:
            end = self._value.find(self._text)
            self._text = after = self._text[end:]
            if not self._value.has_ended:
                return False
        self._text, self._where = after, _Where.TEXT
        return bool(after)

    def _add_content(self, text: str) -> None:
        if text and not (self._has_calls and not text.strip(_BETWEEN)):
            self._has_content = True
            self._parts.append(Content(text))

    def _add_call(self, name: str) -> None:
        self._has_calls = True
        self._parts.append(CallStart(name))


class _JsonEnd:
    """Finds the end of a JSON object that comes in parts; ``depth`` 1: its brace came before."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False
        self.has_ended = False

    def find(self, text: str) -> int:
        """How much of ``text`` belongs to the object."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.has_ended = True
                    return position + 1
        return len(text)


def _call_in(body: str) -> tuple[str, str] | None:
    """The name and the arguments of a call, whatever the order of its keys."""
    try:
        call: Any = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments)


def _common_end(text: str, start: str) -> int:
    """How many characters at the end of ``text`` could begin ``start``."""
    for count in range(min(len(start) - 1, len(text)), 0, -1):
        if start.startswith(text[-count:]):
            return count
    return 0
