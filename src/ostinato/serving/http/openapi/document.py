"""Which answers each route has, as the OpenAPI document lists them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from ostinato.serving.http.openapi.answer_schemas import ErrorAnswer

_ERRORS = {
    400: "The request is wrong, or this model cannot do what it asks for.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or no such route.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not sent as `application/json`.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "The server failed; its log says more.",
    503: "The engine has failed, or the server is shutting down.",
    504: "The request took longer than it may.",
}
_EVENT = {  # one of the stream
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_ANSWERED = (400, 404, 408, 413, 415, 429, 504)  # by routes that take a body

Responses = dict[int | str, dict[str, Any]]


def read(answer: type[BaseModel], *errors: int) -> Responses:
    """The answers of a route that only looks something up, with its ``errors`` beside those that
    every route has."""
    return {200: {"model": answer}, **_described(401, *errors, 500, 503)}


def asked(answer: type[BaseModel], *, streams: bool = False) -> Responses:
    """The answers of a route that takes a body."""
    responses = read(answer, *_ANSWERED)
    if streams:
        responses[200]["description"] = (
            "The whole answer, or with `stream` its parts as server-sent events."
        )
        responses[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    return responses


def text(media_type: str) -> Responses:
    """The answers of a route whose body is text."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {200: {"content": content}, **_described(401, 500, 503)}


def complete(app: FastAPI, *, open_paths: frozenset[str] | None) -> dict[str, Any]:
    """The document of ``app``, once it has all its routes, without what FastAPI assumes: errors
    of validation are 400 here. ``open_paths`` need no key; None: there is no key."""
    document = app.openapi()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if open_paths is not None and path not in open_paths:
                operation["security"] = [{"key": []}]
    if open_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _described(*statuses: int) -> Responses:
    return {
        status: {"model": ErrorAnswer, "description": _ERRORS[status]}
        for status in sorted(statuses)
    }
