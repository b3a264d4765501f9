"""``StructuredOutputsParams``: the form that the text of a request must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ConfigError
from ostinato.options import Foreign, option, user_options
from ostinato.quoting import said, shown

# What compiles within the stack and the time that a grammar gets.
MAX_GRAMMAR_CHARACTERS = 2**18
KINDS = ("json", "regex", "choice", "grammar", "json_object")

_ANY_OBJECT = '{"type":"object"}'
_FOREIGN = {
    "structural_tag": Foreign("write grammar, in Lark's syntax", (None,)),
    "disable_fallback": Foreign("there is one library, llguidance; omit it", (False,)),
    "disable_additional_properties": Foreign(
        "write additionalProperties: false in the schema", (False,)
    ),
}


@user_options(example="regex", foreign=_FOREIGN)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the text of a request must have: exactly one of the first five.

    Names and meanings are vLLM's. Texts may have ``MAX_GRAMMAR_CHARACTERS`` at most.
    """

    json: str | Mapping[str, Any] | bool | None = option(
        None, "A JSON schema, or its text: the output is JSON that it describes."
    )
    regex: str | None = option(None, "The whole output matches it, in the syntax of Rust's regex.")
    choice: Sequence[str] | None = option(None, "The output is one of these texts.")
    grammar: str | None = option(
        None, "A context-free grammar in Lark's syntax, or GBNF; it begins at the rule start."
    )
    json_object: bool | None = option(None, "True: the output is a JSON object, any.")
    disable_any_whitespace: bool = option(
        False, "Of JSON: no whitespace between its parts, except what the separators have."
    )
    whitespace_pattern: str | None = option(
        None, "Of JSON: a regex for the whitespace between its parts."
    )

    def __post_init__(self) -> None:
        # Stored as plain immutable values: they are compared, hashed and outlive the caller's.
        object.__setattr__(self, "json_object", self._flag("json_object") or None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        (kind,) = given
        self._flag("disable_any_whitespace")
        if kind == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif kind == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif kind != "json_object":
            _check_text(kind, getattr(self, kind))
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
        takes_whitespace = kind in ("json", "json_object")
        if not takes_whitespace and (self.disable_any_whitespace or self.whitespace_pattern):
            raise ConfigError(
                "structured_outputs: disable_any_whitespace and whitespace_pattern are for json, "
                f"not for {kind}; leave them out"
            )

    def _flag(self, name: str) -> bool:
        value = getattr(self, name)
        if not isinstance(value, bool | None):
            raise ConfigError(
                f"structured_outputs: {name} must be True or False, got {shown(value)}"
            )
        return bool(value)

    @property
    def schema(self) -> str | None:
        """The text of the JSON schema, if the output is JSON."""
        if self.json_object:
            return _ANY_OBJECT
        assert self.json is None or isinstance(self.json, str), "kept as text"
        return "{}" if self.json == "true" else self.json  # llguidance takes no other schema

    @property
    def kind(self) -> str:
        """Which of ``KINDS`` it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)


def structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """What a user gave as ``structured_outputs``: None, the object itself, or a dict of it."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return StructuredOutputsParams(**value)
    raise ConfigError(
        "structured_outputs must be StructuredOutputsParams(json=...), with regex, choice or "
        f"grammar instead of json, or a dict of that, got {shown(value)}"
    )


def _schema_text(schema: Any) -> str:
    """The schema in one spelling, whether it was given as text or as a value."""
    what = "structured_outputs: json must be a JSON schema"
    try:
        if isinstance(schema, str):
            _check_text("json", schema)
            schema = json.loads(schema)
        if not isinstance(schema, Mapping | bool):
            raise ConfigError(f"{what}, a dict or the text of one, got {shown(schema)}")
        text = json.dumps(schema, separators=(",", ":"), allow_nan=False, default=_plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{what}, a dict or the text of one: {said(error)}") from None
    _check_text("json", text)
    return text


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{shown(value)} is not JSON")


def _choices(given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    if not is_list or not given:
        raise ConfigError(f"structured_outputs: choice must be a list of texts, got {shown(given)}")
    for text in given:
        _check_text("choice", text)
    if sum(map(len, given)) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long("choice")
    return tuple(given)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"structured_outputs: {name} must be text, got {shown(value)}")
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(name)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"structured_outputs: {name} has lone surrogates, got {shown(value)}")


def _too_long(name: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs: {name} exceeds the limit of {MAX_GRAMMAR_CHARACTERS:,} characters; "
        "shorten it"
    )
