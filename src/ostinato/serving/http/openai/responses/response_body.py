"""``ResponseBody``: a response in OpenAI's form, and the events of one that is streamed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from ostinato.serving.http.openai.answers import Usage
from ostinato.serving.http.openai.responses.response_request import ResponseRequest


class ResponseBody:
    """One response with one message; what changes is passed, what stays is kept."""

    def __init__(self, model: str, body: ResponseRequest) -> None:
        self._id, self._item_id = f"resp_{uuid4().hex}", f"msg_{uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._numbers = itertools.count()

    def whole(
        self, text: str | None, finish_reason: str | None, usage: Usage | None
    ) -> dict[str, Any]:
        """The response; None for what is not known yet."""
        body = self._body
        ended = finish_reason is not None
        incomplete = finish_reason == "length"
        status = _status(finish_reason)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended and not incomplete else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [self._item(text or "", status)] if ended else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": body.format or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if text is None else [_part(text)],
        }

    # --- events, in their order ----------------------------------------------------------------

    def begin(self) -> Iterator[dict[str, Any]]:
        """Before the first text."""
        response = self.whole(None, None, None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = self._item(None, "in_progress")
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def delta(self, text: str) -> dict[str, Any]:
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, text: str, finish_reason: str, usage: Usage) -> Iterator[dict[str, Any]]:
        """After the last text, which is now known as a whole."""
        yield self._event("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_part(text))
        item = self._item(text, _status(finish_reason))
        yield self._event("response.output_item.done", output_index=0, item=item)
        response = self.whole(text, finish_reason, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: dict[str, Any]) -> dict[str, Any]:
        """The event of an error in OpenAI's shape."""
        what = {name: error[name] for name in ("message", "code", "param")}
        return self._event("error", **what)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}


def _status(finish_reason: str | None) -> str:
    if finish_reason is None:
        return "in_progress"
    return "incomplete" if finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
