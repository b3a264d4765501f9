"""``ToolChoices``: choices of a chat in which the model may call tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from ostinato.outputs import CompletionOutput, TextDelta
from ostinato.serving.http.openai.answers import ChatChoices
from ostinato.serving.http.openai.tools.call_parser import Arguments, CallParser, CallStart, Part
from ostinato.serving.http.openai.tools.tool_request import ToolRequest


class ToolChoices(ChatChoices):
    """``ChatChoices`` with ``tool_calls``, whole or in parts."""

    def __init__(self, num_top: int, request: ToolRequest) -> None:
        super().__init__(num_top)
        self._request = request
        self._parsers: dict[int, CallParser] = {}
        self._num_calls: dict[int, int] = {}

    def first(self, index: int) -> dict[str, Any]:
        """The part that says who speaks: there may be no content."""
        choice = super().first(index)
        choice["delta"]["content"] = None
        return choice

    def whole(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        choice = super().whole(index, output)
        parser = CallParser(self._request.form)
        content, calls = self._read(index, [*parser.feed(output.text), *parser.finish()])
        message = choice["message"]
        message["content"] = content.strip() or None if calls else content
        if calls:
            for call in calls:
                del call["index"]
            message["tool_calls"] = calls
        choice["finish_reason"] = self._reason(index, output.finish_reason)
        return choice

    def part(self, index: int, delta: TextDelta) -> dict[str, Any]:
        choice = super().part(index, delta)
        parser = self._parsers.setdefault(index, CallParser(self._request.form))
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        content, calls = self._read(index, parts)
        its_delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            its_delta["tool_calls"] = calls
        choice["delta"] = its_delta
        choice["finish_reason"] = self._reason(index, delta.finish_reason)
        return choice

    def _read(self, index: int, parts: Iterable[Part]) -> tuple[str, list[dict[str, Any]]]:
        """The content of ``parts``, and their calls in OpenAI's form, each as one object."""
        content, calls = "", list[dict[str, Any]]()
        for part in parts:
            if isinstance(part, CallStart):
                number = self._num_calls.get(index, 0)
                self._num_calls[index] = number + 1
                calls.append(
                    {
                        "index": number,
                        "id": f"call_{uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": part.name, "arguments": ""},
                    }
                )
            elif isinstance(part, Arguments):
                number = self._num_calls[index] - 1
                if not calls or calls[-1]["index"] != number:
                    calls.append({"index": number, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += part.text
            else:
                content += part.text
        return content, calls

    def _reason(self, index: int, reason: str | None) -> str | None:
        """As OpenAI has it: a call that was chosen by name is not a reason to end."""
        calls = self._num_calls.get(index, 0) and not self._request.is_named
        return "tool_calls" if calls and reason == "stop" else reason
