"""JSON as the standard has it: bodies that are read, and answers that quote them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

from ostinato.serving.http.errors import BodyError


class JsonRoute(APIRoute):
    """A route whose body is strictly JSON. Python's own parser also takes NaN and infinities,
    which no answer could quote."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strictly


class QuotingResponse(JSONResponse):
    """An answer that quotes what a client has sent: in ASCII, for lone surrogates may be in it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, parse_constant=_refuse, parse_float=_finite)
        except json.JSONDecodeError:
            raise
        except RecursionError:
            raise _invalid("it is nested too deeply") from None
        except UnicodeDecodeError:
            raise _invalid("it is not UTF-8") from None
        except ValueError:  # Python's limit, which keeps the conversion from taking minutes
            raise _invalid("a number has too many digits") from None


def _refuse(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _invalid(f"{text[:20]} is too large a number")
    return value


def _invalid(why: str) -> BodyError:
    return BodyError(400, f"the body is not valid JSON: {why}", code="invalid_json")
