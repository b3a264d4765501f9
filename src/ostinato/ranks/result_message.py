"""Encodes results from rank 0 for ranks that run the same script: outputs, deltas and errors.

Messages are JSON, so decoding one creates only the types below.
"""

from __future__ import annotations

import builtins
import json
from typing import Any

from ostinato import errors
from ostinato.errors import CollectiveError, RankFailedError
from ostinato.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (CompletionOutput, Logprob, RequestOutput, TextDelta)
}
_TYPE, _ERROR = "type", "error"
_PLAIN = str | int | float | None


def encode_result(result: Any) -> bytes:
    """Encode what ``LLM`` returns: outputs and deltas, single or in lists, or None."""
    return json.dumps(result, default=_fields).encode()


def encode_error(error: BaseException) -> bytes:
    """Encode ``error`` for ``decode_result`` to raise, or describe it if its type is unknown there.

    Ostinato's and Python's own error types are known if their arguments are text and numbers.
    """
    name = type(error).__name__
    made = _error_fields(name, error)
    try:
        if type(_error(json.loads(json.dumps(made)))) is not type(error):
            raise TypeError(f"{name} decodes to another type")
    except Exception:  # an error may contain anything
        described = RankFailedError(f"rank 0 raised {name}: {error}", 0)
        made = _error_fields("RankFailedError", described)
    return json.dumps(made).encode()


def decode_result(data: bytes) -> Any:
    """Return an encoded result, or raise an encoded error."""
    try:
        result = json.loads(data, object_hook=_object)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CollectiveError(
            f"a message of {len(data)} bytes is not a result ({type(error).__name__}: {error}); "
            "all ranks must run the same version"
        ) from error
    if isinstance(result, Exception):
        raise result
    return result


def _fields(value: Any) -> dict[str, Any]:
    if _TYPES.get(type(value).__name__) is not type(value):
        raise TypeError(f"a {type(value).__name__} cannot be shared between ranks")
    return {_TYPE: type(value).__name__, **vars(value)}


def _object(fields: dict[str, Any]) -> Any:
    if _ERROR in fields:
        return _error(fields)
    if _TYPE not in fields:
        return {int(token): logprob for token, logprob in fields.items()}  # of one position
    return _TYPES[fields.pop(_TYPE)](**fields)


def _error(fields: dict[str, Any]) -> Exception:
    name = fields[_ERROR]
    kind = getattr(errors, name, None) or getattr(builtins, name)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{name} is not an error type")
    made = kind(*fields["args"])
    vars(made).update(fields["attributes"])
    return made


def _error_fields(name: str, error: BaseException) -> dict[str, Any]:
    attributes = [each for each in vars(error).items() if isinstance(each[1], _PLAIN)]
    return {_ERROR: name, "args": error.args, "attributes": attributes}
