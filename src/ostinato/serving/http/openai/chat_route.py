"""``/v1/chat/completions``: a conversation as a task, with structure and tools."""

from __future__ import annotations

from ostinato.serving.http.errors import ApiError
from ostinato.serving.http.openai import generation
from ostinato.serving.http.openai.answers import ChatChoices
from ostinato.serving.http.openai.protocol import ChatRequest
from ostinato.serving.http.openai.structure import Structure, structure_of
from ostinato.serving.http.openai.tools.tool_choices import ToolChoices
from ostinato.serving.http.openai.tools.tool_request import tool_request
from ostinato.serving.http.state import Served
from ostinato.text.chat_options import ChatOptions


def chat_task(served: Served, body: ChatRequest) -> generation.Task:
    """What ``body`` asks for."""
    served.check_task("generate")
    most, older = body.max_completion_tokens, body.max_tokens
    num_top = body.top_logprobs or 0
    structure = structure_of(body)
    calls = tool_request(body, served.llm.tokenizer)
    if calls is not None and structure is not None:
        raise ApiError(
            400,
            "an answer of this structure cannot call tools; leave tools out, or set tool_choice to "
            '"none"',
            param="tools",
        )
    if calls is not None and calls.structure is not None:
        structure = Structure("tools", calls.structure)
    return generation.task(
        served,
        body,
        [body.messages],
        ChatChoices(num_top) if calls is None else ToolChoices(num_top, calls),
        max_tokens=older if most is None else most,
        logprobs=num_top if body.logprobs else None,
        structure=structure,
        names={
            "max_tokens": "max_tokens" if most is None else "max_completion_tokens",
            "logprobs": "top_logprobs",
        },
        chat=ChatOptions(
            tools=None if calls is None else calls.tools,
            chat_template_kwargs=body.chat_template_kwargs,
        ),
    )
