"""Checks conversations, and turns them into token ids with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ostinato.errors import RequestError
from ostinato.quoting import said, shown
from ostinato.text.chat_options import NO_CHAT_OPTIONS, ChatOptions, check_names
from ostinato.text.image_parts import image_of, is_image_part
from ostinato.text.prompts import check_text, encode
from ostinato.text.template_process import TemplateProcess

Message: TypeAlias = Mapping[str, Any]

_EXAMPLE = '[{"role": "user", "content": "..."}]'


def list_conversations(messages: Any) -> list[tuple[str, Any]]:
    """The conversations, one or several, each with its name in errors."""
    _check_list("messages", messages)
    if not any(_is_list(each) for each in messages):
        return [("messages", messages)]
    return [(f"messages[{number}]", each) for number, each in enumerate(messages)]


def render_chat(
    templates: TemplateProcess,
    tokenizer: Any,
    messages: Any,
    max_model_len: int,
    name: str = "messages",
    images: list[Any] | None = None,
    options: ChatOptions = NO_CHAT_OPTIONS,
) -> list[int]:
    """The token ids of a conversation, up to the start of the answer.

    Its images are appended to ``images``, and the tokens have a placeholder for each; None: the
    model takes none.
    """
    _check_list(name, messages)
    tools, given = options.listed_tools(), options.variables()
    plain = [_plain(f"{name}[{number}]", each, images) for number, each in enumerate(messages)]
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model has no chat template, so it cannot take messages; use generate()"
        )
    template = chat_template(tokenizer, tools)
    if "developer" not in template:  # many would drop the message without a word
        plain = [_as_system(each) for each in plain]
    ours = _variables(tokenizer, plain, tools)
    if given:
        check_names(given, ours, templates.variables_read(template, name))
    text = templates.render(template, {"documents": None, **ours, **given}, name)
    # The template already includes the special tokens.
    return encode(name, text, tokenizer, max_model_len, add_special_tokens=False)


def chat_template(tokenizer: Any, tools: Any = None) -> str:
    """The model's template for conversations, with tools if there are any."""
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except Exception as error:
        raise RequestError(
            f"the model's chat template cannot be used: {said(error)}; render the messages "
            "yourself and use generate()"
        ) from error


def _variables(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The variables that transformers passes to a template, besides a user's."""
    return {
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": True,
    }


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_list(name: str, messages: Any) -> None:
    if not _is_list(messages):
        raise RequestError(
            f"{name} must be a list of messages, such as {_EXAMPLE}, got {shown(messages)}; for "
            "plain text use generate()"
        )
    if not messages:
        raise RequestError(
            f"the conversation is empty ({name} is {shown(messages)}); give at least one message, "
            f"such as {_EXAMPLE}"
        )


def _plain(name: str, message: Any, images: list[Any] | None) -> dict[str, Any]:
    """A message with its content as text, which is what templates of text models read.

    With images, the content stays a list, without them.
    """
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{name} must be a message, such as {{"role": "user", "content": "..."}}, got '
            f"{shown(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str):
        what = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise RequestError(f"{name} {what}; give one that the model knows, such as 'user'")
    check_text(f"{name}['role']", role)
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _calls(name, message["tool_calls"])}
    content: Any = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)  # an answer that only calls tools
    name = f"{name}['content']"
    if images is not None and _is_list(content) and any(map(is_image_part, content)):
        parts = enumerate(content)
        listed = [_shown_part(f"{name}[{number}]", part, images) for number, part in parts]
        return {**message, "content": listed}
    return {**message, "content": _text(name, content, "content" in message, images is not None)}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """The message, or if its role is OpenAI's newer name for the system, one with the older."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _calls(name: str, calls: Any) -> list[Any]:
    """Calls of tools with their arguments as objects, as templates read them, not as JSON texts."""
    name = f"{name}['tool_calls']"
    if not _is_list(calls) or not all(isinstance(each, Mapping) for each in calls):
        raise RequestError(f"{name} must be a list of calls, got {shown(calls)}")
    read = []
    for number, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"{name}[{number}]['function']['arguments'] must be JSON: {said(error)}"
                ) from None
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append(call)
    return read


def _shown_part(name: str, part: Any, images: list[Any]) -> dict[str, str]:
    """A part as a template sees it; an image is appended to ``images``."""
    if is_image_part(part):
        images.append(image_of(name, part))
        return {"type": "image"}
    return {"type": "text", "text": _part(name, part, takes_images=True)}


def _text(name: str, content: Any, given: bool, takes_images: bool) -> str:
    if not given:
        raise RequestError(f"{name} is missing; give the text of the message, '' if it has none")
    if isinstance(content, str):
        check_text(name, content)
        return content
    if not _is_list(content):
        raise RequestError(
            f"{name} must be text, or a list of text parts, got {shown(content)}; give the text of "
            "the message, '' if it has none"
        )
    return "\n".join(
        _part(f"{name}[{number}]", part, takes_images=takes_images)
        for number, part in enumerate(content)
    )


def _part(name: str, part: Any, *, takes_images: bool) -> str:
    kind: Any = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind != "text":
        what = f"is a part of type {shown(kind)}" if "type" in part else "is a part without a type"
        taken = "text and images" if takes_images else "text"
        raise RequestError(
            f'{name} {what}; this model takes {taken} only: {{"type": "text", "text": "..."}}'
        )
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise RequestError(
            f'{name} must be text, as in {{"type": "text", "text": "..."}}, got {shown(part)}'
        )
    check_text(name, text)
    return text
