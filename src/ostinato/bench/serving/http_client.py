"""One client of a server that speaks OpenAI's protocol: streams completions and notes the times."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from ostinato.bench.mixes import TimedRequest
from ostinato.bench.serving.answer import Answer
from ostinato.bench.serving.open_loop import Clock
from ostinato.bench.serving.words import as_text
from ostinato.errors import ConfigError, MeasurementError
from ostinato.quoting import said, shown
from ostinato.serving.http.server_config import is_loopback

FAILURES = (httpx.HTTPError, ValueError, KeyError)

_DATA = "data: "
_ERROR_CHARS = 200


def check_url(url: str, *, allow_remote: bool) -> str:
    """A server's address without a slash at the end; on this machine, unless others are allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url takes an address such as http://127.0.0.1:8000, got {shown(url)}")
    if not (allow_remote or is_loopback(parts.hostname)):
        raise ConfigError(
            f"{shown(parts.hostname)} is a remote host; pass --allow-remote only if you may put it "
            "under load"
        )
    return url.rstrip("/")


class Client:
    """Asks one server. ``extra``: fields of the body by which it generates as many tokens as asked.

    The streams of all requests share an event loop, and each has a connection.
    """

    def __init__(self, url: str, *, api_key: str | None, extra: dict[str, Any]) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=None,  # a run has a limit of its own
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxies
        )
        self._extra = extra
        self._model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            return (await self._http.get("/health")).is_success
        except httpx.HTTPError:
            return False

    async def choose_model(self, name: str | None = None) -> str:
        """Ask for this model from now on. None: the first that the server lists."""
        if name is None:
            answer = await self._http.get("/v1/models")
            try:
                name = answer.raise_for_status().json()["data"][0]["id"]
            except (*FAILURES, IndexError, TypeError) as error:
                raise MeasurementError(
                    f"the server did not list its models: {said(error)}"
                ) from error
        self._model = name
        return str(name)

    async def send(self, request: TimedRequest, answer: Answer, clock: Clock) -> None:
        """Stream one completion."""
        body = {
            "model": self._model,
            "prompt": as_text(request.prompt_token_ids),
            "max_tokens": request.output_len,
            "temperature": 0,
            "stream": True,
            **self._extra,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")[:_ERROR_CHARS]
                raise MeasurementError(f"HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if line.startswith(_DATA) and line != f"{_DATA}[DONE]":
                    _take(json.loads(line.removeprefix(_DATA)), answer, clock)
        if not answer.output_tokens:
            raise MeasurementError("the stream ended without its usage")


def _take(event: dict[str, Any], answer: Answer, clock: Clock) -> None:
    if event.get("error") is not None:
        raise MeasurementError(f"an error in the stream: {shown(event['error'])}")
    choices = event["choices"]
    if choices and choices[0].get("text"):
        answer.note(clock())
    usage = event.get("usage")
    if usage is not None:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
