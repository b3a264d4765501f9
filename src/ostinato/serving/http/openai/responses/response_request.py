"""The body of ``/v1/responses``, and the conversation in it."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from ostinato.quoting import shown
from ostinato.serving.http.errors import ApiError
from ostinato.serving.http.openai.protocol import NOTHING, Body, Many, StreamOptions

_STATELESS = "answers are not stored here; send the whole conversation as input"
_MOST_METADATA = 16  # as OpenAI has it
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponseRequest(Body):
    """What OpenAI's clients send. What would need storage, tools or reasoning is refused."""

    refused = {
        "background": NOTHING,
        "context_management": NOTHING,
        "image": NOTHING,
        "include": NOTHING,
        "max_tool_calls": NOTHING,
        "moderation": NOTHING,
        "prompt": NOTHING,
        "reasoning": NOTHING,
        "tools": NOTHING,
        "tool_choice": (*NOTHING, "none", "auto"),
        "top_logprobs": (*NOTHING, 0),
        "truncation": (*NOTHING, "disabled"),
    }

    model: str | None = None
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: Any = None
    context_management: Any = None
    image: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    reasoning: Any = None
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    # These change no answer.
    access_programs: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    # Ours, and vLLM's.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_METADATA:
            raise ValueError(
                f"metadata may have at most {_MOST_METADATA} entries, got {len(value)}"
            )
        return value

    def check_stateless(self) -> None:
        """Refuse what would need an answer that was stored, or storing this one."""
        for name in ("store", "previous_response_id", "conversation"):
            if getattr(self, name) not in (None, False):
                raise ApiError(
                    400,
                    f"{name} is {shown(getattr(self, name))}, but {_STATELESS}, and leave {name} "
                    "out",
                    param=name,
                    code="not_stored",
                )

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, as a chat has it; the instructions come first."""
        if not self.input and not isinstance(self.input, str):
            raise ApiError(400, "input is empty; give a text, or messages", param="input")
        first = []
        if self.instructions is not None:
            first.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return first + [_message(number, item) for number, item in enumerate(self.input)]

    @property
    def format(self) -> Any:
        """The format of the text, if one is given."""
        text = self.text or {}
        for name in text:
            if name != "format" and text[name] is not None:
                raise ApiError(
                    400, f"text.{name} is not supported here; leave it out", param="text"
                )
        return text.get("format")


def _message(number: int, item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as a message."""
    name, kind = f"input[{number}]", item.get("type", "message")
    role, content = item.get("role"), item.get("content")
    if kind != "message" or not isinstance(role, str):
        raise ApiError(
            400,
            f'{name} must be a message, such as {{"role": "user", "content": "..."}}, got '
            f"{shown(item)}",
            param="input",
        )
    if isinstance(content, list):
        content = "\n".join(_text(f"{name}.content[{n}]", part) for n, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(
            400,
            f"{name}.content must be text, or a list of texts, got {shown(content)}",
            param="input",
        )
    return {"role": role, "content": content}


def _text(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ApiError(
            400,
            f'{name} must be {{"type": "input_text", "text": "..."}}: /v1/responses takes only '
            f"text here, got {shown(part)}; for images use /v1/chat/completions",
            param="input",
        )
    return str(part["text"])
