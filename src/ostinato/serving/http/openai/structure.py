"""The structure that the answer to a request must have, from the fields that ask for one.

OpenAI's is ``response_format``; vLLM's clients send ``structured_outputs``, and older ones
``guided_json`` and its like.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ostinato.errors import ConfigError, RequestError
from ostinato.quoting import shown
from ostinato.serving.http.errors import ApiError
from ostinato.structured.params import StructuredOutputsParams, structured_outputs

_ENGINES_NAME = "structured_outputs"
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


class Structure(NamedTuple):
    """What a request asks for, and the field that does."""

    field: str
    params: StructuredOutputsParams

    def explain(self, error: RequestError) -> ApiError | RequestError:
        """An error of the engine's that may be about the structure, under the client's name."""
        message = _under(self.field, error)
        return error if message is None else ApiError(400, message, param=self.field)


def structure_of(body: Any) -> Structure | None:
    """What the fields of ``body`` ask for; None: any text."""
    found: list[Structure] = []
    for name in ("response_format", _ENGINES_NAME, *_GUIDED):
        value = getattr(body, name, None)
        if value is not None:
            params = _read(name, value)
            if params is not None:
                found.append(Structure(name, params))
    if len(found) > 1:
        raise ApiError(
            400,
            f"{' and '.join(each.field for each in found)} each set the structure of the answer; "
            "give only one of them",
            param=found[0].field,
        )
    return found[0] if found else None


def text_format(name: str, value: Any) -> StructuredOutputsParams | None:
    """A format of OpenAI's: ``{"type": "json_schema", "json_schema": {...}}`` and its like.

    ``/v1/responses`` has the schema beside the type. None: plain text.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise ApiError(
            400,
            f"{name} must have the type text, json_object or json_schema, got {shown(value)}; for "
            "a regex, choices or a grammar use structured_outputs",
            param=name,
        )
    within = value.get("json_schema", value)
    schema = within.get("schema") if isinstance(within, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            f'{name} has no schema; write {{"type": "json_schema", "json_schema": {{"name": "...", '
            '"schema": {...}}}',
            param=name,
        )
    return StructuredOutputsParams(json=schema)


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    try:
        if name == "response_format":
            return text_format(name, value)
        if name in _GUIDED:
            return StructuredOutputsParams(**{_GUIDED[name]: value})
        return structured_outputs(value)
    except ConfigError as error:
        raise ApiError(400, _under(name, error) or str(error), param=name) from None


def _under(field: str, error: Exception) -> str | None:
    """The text of an error about the structure, under the client's name; None: about another."""
    about, colon, what = str(error).partition(": ")
    return f"{field}: {what}" if about == _ENGINES_NAME and colon else None
