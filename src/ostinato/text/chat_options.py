"""``ChatOptions``: what a conversation tells its template besides its messages.

A template ignores variables that it does not read, so a misspelt one would change nothing without
a word. They are checked against the names that the template reads.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.errors import RequestError
from ostinato.quoting import said, shown
from ostinato.text.prompts import check_text

_NAME = "chat_template_kwargs"
_DEEPEST = 100  # levels of lists and objects
_LONGEST_PATH = 160  # in errors, in characters
# What users cannot set, and what to do instead.
_INSTEAD = {
    "messages": "pass the conversation as messages",
    "tools": "pass them as tools",
    "add_generation_prompt": "conversations are always answered; leave it out",
    "continue_final_message": "render the messages yourself and use generate()",
    "chat_template": "put it into the checkpoint's chat_template.jinja",
}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """``tools``: those that the template tells the model about, in OpenAI's form.

    ``chat_template_kwargs``: further variables of the template, by name.
    """

    tools: Any = None
    chat_template_kwargs: Any = None

    @property
    def given(self) -> list[str]:
        """The names of the options that are not None."""
        return [name for name, value in vars(self).items() if value is not None]

    def listed_tools(self) -> list[Any] | None:
        """The tools, if there are any; raises for what is no list of objects."""
        tools = self.tools
        listed = isinstance(tools, Sequence) and not isinstance(tools, str | bytes | bytearray)
        if tools is not None and not (listed and all(isinstance(each, Mapping) for each in tools)):
            raise RequestError(
                "tools must be a list of objects in OpenAI's form, such as "
                f'[{{"type": "function", "function": {{"name": "..."}}}}], got {shown(tools)}'
            )
        return list(tools) if tools else None

    def variables(self) -> dict[str, Any]:
        """A copy of ``chat_template_kwargs``; raises for what JSON does not have."""
        given = self.chat_template_kwargs
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise RequestError(
                f"{_NAME} must be a dict of variables for the chat template, such as "
                f'{{"enable_thinking": False}}, got {shown(given)}'
            )
        copied: dict[str, Any] = _plain(_NAME, given, 0)
        return copied


NO_CHAT_OPTIONS = ChatOptions()


def check_names(given: Collection[str], ours: Collection[str], read: Collection[str]) -> None:
    """Raise for a name in ``given`` that would change nothing, or what is ours.

    ``ours``: names of variables that are always set; ``read``: those that the template reads.
    """
    reserved = {*ours, *_INSTEAD}
    readable = sorted(set(read) - reserved)
    for name in given:
        if name in reserved:
            instead = _INSTEAD.get(name, "it comes from the checkpoint's tokenizer; leave it out")
            raise RequestError(f"{_NAME} cannot set {shown(name)}: {instead}")
        if name not in read:
            nearest = difflib.get_close_matches(name, readable, n=1, cutoff=0.7)
            hint = f"did you mean {said(nearest[0])}?" if nearest else "leave it out"
            known = said(", ".join(readable)) or "none that can be set"
            raise RequestError(
                f"chat_template_kwargs has {shown(name)}, which the model's chat template does not "
                f"read; {hint} (variables that it reads: {known})"
            )


def _plain(name: str, value: Any, depth: int) -> Any:
    """A copy of ``value`` of JSON's types."""
    if depth > _DEEPEST:
        raise RequestError(
            f"{_NAME} is nested too deeply, above {_DEEPEST} levels; pass flatter values"
        )
    if isinstance(value, str):
        check_text(name, value)
        return value
    if isinstance(value, Mapping):
        return {_key(name, key): _plain(_at(name, key), value[key], depth + 1) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(_at(name, number), each, depth + 1) for number, each in enumerate(value)]
    if value is None or (isinstance(value, int | float) and _is_written(value)):
        return value
    raise RequestError(
        f"{name} must be text, a finite number, true, false, None, or a list or dict of these, "
        f"got {shown(value)}"
    )


def _is_written(value: float) -> bool:
    """Whether JSON has the number: it is finite, and Python writes out its digits."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{name} has the name {shown(key)}; names are texts")
    check_text(f"{name}: a name", key)
    return key


def _at(name: str, key: object) -> str:
    longer = f"{name}[{shown(key)}]"
    return longer if len(longer) <= _LONGEST_PATH else f"{name.removesuffix('[...]')}[...]"
