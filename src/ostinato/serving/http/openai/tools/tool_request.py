"""What a chat asks for with ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ConfigError
from ostinato.quoting import said, shown
from ostinato.serving.http.errors import ApiError
from ostinato.serving.http.openai.tools.call_format import CallFormat, format_of
from ostinato.structured.params import StructuredOutputsParams
from ostinato.text.chat import chat_template

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MOST_TOOLS = 128


@dataclass(frozen=True, kw_only=True)
class ToolRequest:
    """``tools`` for the template; ``form``: how the model calls them.

    ``structure`` of the answer, if it must be a call; ``is_named``: of one function.
    """

    tools: list[dict[str, Any]]
    form: CallFormat
    structure: StructuredOutputsParams | None = None
    is_named: bool = False


def tool_request(body: Any, tokenizer: Any) -> ToolRequest | None:
    """What ``body`` asks for; None: no calls."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(
                400, f"tool_choice is {shown(choice)}, but there are no tools", param="tool_choice"
            )
        return None
    _check(tools)
    if choice == "none":
        return None
    form = _form(tokenizer, tools)
    if choice in (None, "auto"):
        return ToolRequest(tools=tools, form=form)
    name = _named(choice)
    callable_ones = [each for each in tools if name in (None, each["function"]["name"])]
    if not callable_ones:
        raise ApiError(
            400,
            f"tool_choice names {shown(name)}, which is not among the tools",
            param="tool_choice",
        )
    several = name is None and body.parallel_tool_calls is not False
    try:
        structure = form.structure(callable_ones, tokenizer, several=several)
    except (ConfigError, RecursionError) as error:
        raise ApiError(400, f"tools: {said(error)}", param="tools") from None
    return ToolRequest(tools=tools, form=form, structure=structure, is_named=name is not None)


def _named(choice: Any) -> str | None:
    """The function that must be called; None: any."""
    if choice == "required":
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise ApiError(
        400,
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
        f'{{"name": "..."}}}}, got {shown(choice)}',
        param="tool_choice",
    )


def _check(tools: list[Any]) -> None:
    if len(tools) > _MOST_TOOLS:
        raise ApiError(400, f"got {len(tools)} tools; the limit is {_MOST_TOOLS}", param="tools")
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ApiError(
                400,
                f'tools[{number}] must be {{"type": "function", "function": {{"name": "...", '
                f'"parameters": {{...}}}}}}, got {shown(tool)}',
                param="tools",
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ApiError(
                400,
                f"the name of tools[{number}] must be 1 to 64 letters, digits, _ or -, got "
                f"{shown(name)}",
                param="tools",
            )
        if not isinstance(parameters, dict | None):
            raise ApiError(
                400,
                f"the parameters of tools[{number}] must be a JSON schema, got {shown(parameters)}",
                param="tools",
            )
        names.append(name)
    if len(set(names)) < len(names):
        raise ApiError(400, f"two tools have the same name, among {shown(names)}", param="tools")


def _form(tokenizer: Any, tools: list[Any]) -> CallFormat:
    has_template = tokenizer is not None and getattr(tokenizer, "chat_template", None)
    form = format_of(chat_template(tokenizer, tools)) if has_template else None
    if form is None:
        raise ApiError(
            400,
            "this model's chat template uses none of the known formats of tool calls (Hermes and "
            "Qwen's <tool_call>, or Llama's JSON from 3.1 on); leave tools out",
            param="tools",
            code="tools_not_supported",
        )
    return form
