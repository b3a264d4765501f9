"""The structure that the answer to a request must have, from the fields that ask for one.

OpenAI's is ``response_format``; vLLM's clients send ``structured_outputs``, and older ones
``guided_json`` and its like.
"""

from __future__ import annotations

from typing import Any

from ostinato.errors import ConfigError
from ostinato.quoting import shown
from ostinato.serving.http.errors import ApiError
from ostinato.structured.params import StructuredOutputsParams, structured_outputs

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


def structure_of(body: Any) -> StructuredOutputsParams | None:
    """What the fields of ``body`` ask for; None: any text."""
    found: dict[str, StructuredOutputsParams] = {}
    for name in ("response_format", "structured_outputs", *_GUIDED):
        value = getattr(body, name, None)
        if value is not None:
            structure = _read(name, value)
            if structure is not None:
                found[name] = structure
    if len(found) > 1:
        raise ApiError(
            400,
            f"{' and '.join(found)} both say what the answer looks like; leave all but one out",
            param=next(iter(found)),
        )
    return next(iter(found.values()), None)


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
        raise ApiError(400, str(error), param=name) from None
