"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, all of them."""

from __future__ import annotations

import json
import logging
import re
import traceback
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ostinato.errors import (
    AsleepError,
    ClosedError,
    ConfigError,
    EngineFailedError,
    RequestError,
    RequestFailedError,
)
from ostinato.quoting import shown
from ostinato.sampling_params import SamplingParams

_log = logging.getLogger("ostinato.serving")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_PARAMS = {"chat_template_kwargs", "dimensions", *(field.name for field in fields(SamplingParams))}
_TRIED = re.compile(r"(str|list\[.*\]|dict\[.*\])")  # a type of a union, as pydantic shows it


class BodyError(HTTPException):
    """An error of reading a body: FastAPI passes on this kind only."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        headers = {"Connection": "close"} if status in (408, 413) else None  # it is still coming
        super().__init__(status, message, headers)
        self.code = code


class ApiError(Exception):
    """An error for the client. ``param``: the field that is wrong; ``code``: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "server_error"),
                "param": param,
                "code": code,
            }
        }

    def response(self) -> Response:
        # In ASCII: a message may quote what UTF-8 cannot encode.
        content = json.dumps(self.body).encode()
        return Response(content, self.status, self.headers, media_type="application/json")


def api_error(error: BaseException) -> ApiError:
    """What a client is told about ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | ConfigError):
        first = str(error).partition(" ")[0].partition("[")[0].rstrip(":")
        return ApiError(400, str(error), param=first if first in _PARAMS else None)
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineFailedError):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, AsleepError):
        return ApiError(503, "the server is asleep; try again later", code="asleep")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is shutting down; try another one", code="closing")
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors())
    if isinstance(error, HTTPException):
        code = error.code if isinstance(error, BodyError) else None
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), code=code, headers=headers)
    log_failure(error)
    return ApiError(500, f"the server failed ({type(error).__name__}); see its log")


def log_failure(error: BaseException) -> None:
    """Log where an unexpected error was raised, but not its text, which may quote a request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s while serving a request, at\n%s", type(error).__name__, where)


def _validation_error(found: Any) -> ApiError:
    """The first thing that pydantic found wrong."""
    first = found[0]
    parts = [part for part in first["loc"] if part != "body"]
    if len(parts) > 1 and _TRIED.fullmatch(str(parts[1])):
        return _union_error(str(parts[0]), found)
    name = str(parts[0]) if parts else None
    where = ".".join(str(part) for part in parts) or "the body"
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"unrecognized request argument: {shown(where)}", code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{name or 'the body'} is required", param=name)
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    message = first["msg"].removeprefix("Value error, ")
    shows = first["type"] != "value_error"
    return ApiError(400, f"{where}: {message}" if shows else message, param=name)


def _union_error(name: str, found: Any) -> ApiError:
    """What is wrong with a field of several types, each of which pydantic has tried."""
    of_field = [each for each in found if name in each["loc"][:2]]
    nearest = max(of_field, key=lambda each: len(each["loc"]))
    within = nearest["loc"][nearest["loc"].index(name) + 2 :]
    if within:  # this type fits, but for one element
        where, messages = ".".join(map(str, (name, *within))), [nearest["msg"]]
    else:
        where, messages = name, list(dict.fromkeys(each["msg"] for each in of_field))
    what = " or ".join(
        [messages[0], *(each.removeprefix("Input should be ") for each in messages[1:])]
    )
    return ApiError(400, f"{where}: {what}", param=name)


def add_handlers(app: FastAPI) -> None:
    """Give all errors of ``app`` this shape."""

    async def answer(_: Request, error: Exception) -> Response:
        return api_error(error).response()

    for kind in (
        *(ApiError, RequestError, ConfigError, EngineFailedError, AsleepError, ClosedError),
        *(RequestValidationError, HTTPException),
    ):
        app.add_exception_handler(kind, answer)
