"""The gateway: takes requests over HTTP, and has a replica answer each.

If a replica dies before its answer has begun, another one answers. An answer that has begun ends
with an error in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Protocol

from fastapi import FastAPI, Request
from ray.exceptions import RayActorError
from starlette.responses import JSONResponse, Response

from ostinato.serving.http.access import Guard
from ostinato.serving.http.errors import ApiError, add_handlers
from ostinato.serving.http.limits import Admission, time_limit, unless_gone
from ostinato.serving.http.openai.sse import OwnedStream, error_lines
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.replicas.prompt_prefix import PromptPrefix
from ostinato.serving.replicas.replica import Message, ReplicaFailedError

_TRIES = 5
_PAUSE_S = 0.2
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_SCOPE = ("type", "http_version", "method", "scheme", "path", "query_string", "headers", "client")


class Answer(Protocol):
    """The messages of an answer, as a handle of Ray Serve's returns them."""

    def __aiter__(self) -> AsyncIterator[Message]: ...
    async def __anext__(self) -> Message: ...
    def cancel(self) -> object: ...


def create_gateway(
    ask: Callable[..., Answer], count: Callable[[], Awaitable[int]], config: ServerConfig
) -> FastAPI:
    """An ASGI application. ``ask``: has a replica answer, as ``Replica.answer``; ``count``: how
    many replicas run."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.admission = Admission(2**31)  # each replica has its own limit

    async def health(_: Request) -> Response:
        num_running = await count()
        if app.state.admission.is_closing:
            raise ApiError(503, "the server is shutting down; try another one", code="closing")
        if not num_running:
            raise ApiError(503, "no replica runs; Ray is starting one", code="no_replica")
        return JSONResponse({"status": "ok", "replicas": num_running})

    async def forward(request: Request) -> Response:
        resources = AsyncExitStack()
        try:
            resources.enter_context(app.state.admission.enter(1))
            return await _forward(request, ask, config.request_timeout_s, resources)
        except BaseException:
            await resources.aclose()
            raise

    app.add_route("/health", health, methods=["GET"])
    app.add_route("/{path:path}", forward, methods=_METHODS)
    add_handlers(app)
    app.add_middleware(
        Guard,
        api_key=config.api_key,
        max_body_bytes=config.max_body_bytes,
        max_body_s=config.request_timeout_s,
        count=lambda *_: None,  # replicas count
    )
    return app


async def _forward(
    request: Request, ask: Callable[..., Answer], seconds: float, resources: AsyncExitStack
) -> Response:
    deadline = asyncio.get_running_loop().time() + seconds
    body = await request.body()
    scope = {name: request.scope[name] for name in _SCOPE}
    scope["headers"] = [tuple(each) for each in scope["headers"]]
    prefix = PromptPrefix.of(request.url.path, body)

    def start(avoided: frozenset[str]) -> Answer:
        number = _number(request)
        answer = ask(scope, body, prefix=prefix, avoided=avoided, number=number)
        resources.callback(answer.cancel)  # harmless at its end
        return answer

    async def begin() -> tuple[Answer, Message, Message]:
        async with time_limit(deadline, seconds):
            return await _begin(start)

    answer, head, first = await unless_gone(request, begin())
    rest = _rest(answer, head, first, request.url.path)
    response = OwnedStream(rest, resources, deadline=deadline)
    response.status_code = head["status"]
    response.raw_headers = [tuple(each) for each in head["headers"]]
    return response


def _number(request: Request) -> int | None:
    """The replica that a request is for: metrics and the dashboard are of one."""
    asked = request.query_params.get("replica")
    if request.method != "GET" or asked is None:
        return None
    if not (asked.isascii() and asked.isdecimal() and len(asked) < 5):
        raise ApiError(400, "replica must be a number from 0 on", param="replica")
    return int(asked)


async def _begin(start: Callable[[frozenset[str]], Answer]) -> tuple[Answer, Message, Message]:
    """Have a replica answer until one has begun: its head and the first part of its body."""
    avoided: frozenset[str] = frozenset()
    why = ""
    for _ in range(_TRIES):
        answer = start(avoided)
        try:
            return answer, await anext(answer), await anext(answer)
        except ReplicaFailedError as error:
            why, avoided = str(error), avoided | {error.replica}
        except RayActorError:
            why = "the process of a replica died"  # Ray's router will not choose it again
        await asyncio.sleep(_PAUSE_S)
    raise ApiError(503, f"{_TRIES} replicas failed with this request: {why}", code="no_replica")


async def _rest(answer: Answer, head: Message, first: Message, path: str) -> AsyncIterator[bytes]:
    kind = dict(head["headers"]).get(b"content-type", b"")
    yield first.get("body", b"")
    try:
        async for message in answer:
            yield message.get("body", b"")
    except RayActorError:
        if not kind.startswith(b"text/event-stream"):
            raise  # all that is left is to break it off
        error = ApiError(
            503,
            "the replica that answered has died, and the rest of the answer is lost; ask again",
            code="replica_died",
        )
        yield error_lines(error.body["error"], named=path == "/v1/responses")
