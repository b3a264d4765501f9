"""Checks every request before its route: the API key, the limits of its body. Counts its answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.errors import ClosedError
from ostinato.serving.http.errors import ApiError, BodyError, api_error
from ostinato.serving.http.page import PAGE_PATHS

# Load balancers have no key, and the page that asks for one needs none itself.
OPEN_PATHS = frozenset({"/health", *PAGE_PATHS})

_TOO_LARGE = "body_too_large"
# h11 stops reading there, but it sees what is read at once, up to 256 KiB, as a whole.
_MOST_HEADER_BYTES = 64 * 1024

Count = Callable[[str, int], None]


class Guard:
    """Asks for the key (unless None), limits the size of bodies and the time they take, and reports
    path and status to ``count``.

    It is the outermost layer, so it also answers what no other part expected.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        max_body_s: float,
        count: Count,
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._most = max_body_bytes
        self._seconds = max_body_s
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if scope["method"] == "HEAD":  # the same without the body, which the server leaves out
            scope = {**scope, "method": "GET"}
        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), counted)
        except Exception as error:
            if status:
                raise  # the answer has begun; all that is left is to break it off
            await api_error(error).response()(scope, receive, counted)
        except asyncio.CancelledError:  # the server ends, and the time for its requests is over
            if status:
                raise
            await api_error(ClosedError()).response()(scope, receive, counted)
        finally:
            self._count(scope["path"], status)

    def _check(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope["path"]) + len(scope["query_string"]) > _MOST_HEADER_BYTES:
            raise ApiError(400, "the headers exceed 64 KiB", code="headers_too_large")
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            # Both in constant time, so that a guess learns nothing from how long it took.
            is_right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
            if not is_right or kind.lower() != "bearer":
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json" and _is_served(scope):
            # Any other type may come from a page of another origin, in a browser on this machine.
            raise ApiError(
                415,
                "the body must be JSON, sent with the header 'Content-Type: application/json'",
                code="unsupported_media_type",
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """``receive`` that stops at the limits: a body may come in parts, lie about its size, and
        take its time."""
        num_bytes, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else deadline):
                    message = await receive()
            except TimeoutError:
                raise BodyError(
                    408,
                    f"the body did not come within {self._seconds:g} s (--request-timeout-s)",
                    code="timeout",
                ) from None
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most:
                raise BodyError(413, str(self._too_large()), code=_TOO_LARGE)
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body exceeds the limit of {self._most:,} bytes (--max-body-bytes)",
            code=_TOO_LARGE,
            headers={"Connection": "close"},
        )


def _is_served(scope: Scope) -> bool:
    """Whether a route takes this request; others are answered with 404 or 405."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)
