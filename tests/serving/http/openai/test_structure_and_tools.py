"""Structured answers, tool calls and /v1/responses, through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving_models import listening
from spelling_models import OPTIONS, save_spelling

from ostinato import AsyncLLM, GraphConfig
from ostinato.serving.http.server_config import ServerConfig

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

# As Qwen's, in short: tools in the system message, calls and their results in the conversation.
TEMPLATE = """\
{%- if tools %}{{ 'Tools:' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- ' Write <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}{% endif %}{{ style }}
{%- for message in messages %}{{ message.role }}:{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %};{% endfor %}assistant:"""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "adopt", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "leave", "description": "a ::= b"}},
]
TALK: Any = [{"role": "user", "content": "a pet"}]
FIXED: Any = {"model": "tiny", "temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from ostinato.serving.http.app import create_app

    path = save_spelling(tmp_path_factory.mktemp("spelling"), TEMPLATE)
    options = {**OPTIONS, "max_model_len": 512, "graphs": GraphConfig(capture_sizes=[1, 4])}
    with AsyncLLM(str(path), device="cpu", **options) as llm:
        config = ServerConfig(served_model_name="tiny", max_prompt_tokens=450)
        with listening(create_app(llm, config)) as url:
            yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_pet(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"kind", "size"} and value["size"] <= 99


@pytest.mark.slow
def test_chats_have_the_format_that_is_asked_for(client: Any) -> None:
    answer = client.chat.completions.create(messages=TALK, response_format=FORMAT, n=2, **FIXED)
    assert all(is_pet(choice.message.content) for choice in answer.choices)
    assert all(choice.finish_reason == "stop" for choice in answer.choices)
    parts = client.chat.completions.create(
        messages=TALK, response_format=FORMAT, stream=True, **FIXED
    )
    assert is_pet("".join(part.choices[0].delta.content or "" for part in parts))


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{5}"}}, "[ab]{5}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[ab]{5}"}, "[ab]{5}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"guided_json": {"const": 3}}, "3"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, r"\{.*"),
    ],
    ids=str,
)
def test_completions_have_it_too(extra: dict[str, Any], pattern: str, client: Any) -> None:
    answer = client.completions.create(prompt="a", max_tokens=60, extra_body=extra, **FIXED)
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL)


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "text, json_object or json_sch"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "did you mean regex"),
        ({"guided_choice": []}, "guided_choice", "choice must be a list"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "response_format: this json cannot be used: Invalid type: x",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "tools: this grammar cannot be used: .*Invalid type: x",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "give only one of them"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "tools",
            "cannot call tools",
        ),
        ({"tools": [{"type": "web"}]}, "tools", "must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "1 to 64"),
        ({"tools": TOOLS + TOOLS}, "tools", "the same name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "buy"}}},
            "tool_choice",
            "not among the tools",
        ),
    ],
    ids=str,
)
def test_mistakes_have_openais_shape(
    extra: dict[str, Any], param: str, message: str, client: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(messages=TALK, extra_body=extra, **FIXED)
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"


def check_calls(calls: list[Any]) -> None:
    assert calls
    for call in calls:
        assert call.id.startswith("call_")
        assert call.type == "function"
        if call.function.name == "adopt":
            assert is_pet(call.function.arguments)
        else:
            assert call.function.name == "leave"
            assert isinstance(json.loads(call.function.arguments), dict)


def streamed(parts: Any) -> tuple[list[Any], str]:
    """The calls of a stream, put together as clients do, and why it ended."""
    calls: list[Any] = []
    reason = ""
    for part in parts:
        choice = part.choices[0]
        reason = choice.finish_reason or reason
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                assert delta.index == len(calls)
                calls.append(delta)
            else:
                calls[delta.index].function.arguments += delta.function.arguments
    return calls, reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_named_function_is_called(stream: bool, client: Any) -> None:
    choice: Any = {"type": "function", "function": {"name": "adopt"}}
    answer = client.chat.completions.create(
        messages=TALK, tools=TOOLS, tool_choice=choice, stream=stream, **FIXED
    )
    if stream:
        calls, reason = streamed(answer)
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        assert message.content is None
        calls = message.tool_calls
    assert reason == "stop"
    assert [call.function.name for call in calls] == ["adopt"]
    check_calls(calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_required_calls_always_parse(seed: int, client: Any) -> None:
    options = {**FIXED, "seed": seed, "tools": TOOLS[:1], "tool_choice": "required"}
    answer = client.chat.completions.create(messages=TALK, parallel_tool_calls=False, **options)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 1
    check_calls(choice.message.tool_calls)
    parts = client.chat.completions.create(
        messages=TALK, parallel_tool_calls=False, stream=True, **options
    )
    calls, reason = streamed(parts)
    assert reason == "tool_calls"
    expected = choice.message.tool_calls[0].function
    assert calls[0].function.model_dump() == expected.model_dump()


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_variables_of_the_template_go_with_tools(client: Any, choice: str) -> None:
    counts = []
    for extra in ({}, {"chat_template_kwargs": {"style": "brief"}}):
        answer = client.chat.completions.create(
            messages=TALK, tools=TOOLS, tool_choice=choice, max_tokens=1, extra_body=extra, **FIXED
        )
        counts.append(answer.usage.prompt_tokens)
    assert counts[1] - counts[0] == len("brief")


@pytest.mark.slow
def test_calls_and_their_results_go_through_the_template(client: Any, url: str) -> None:
    called = client.chat.completions.create(
        messages=TALK, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **FIXED
    ).choices[0]
    (call,) = called.message.tool_calls
    history = [
        *TALK,
        called.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(messages=history, max_tokens=5, **tools, **FIXED)
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    broken = called.message.model_dump()
    broken["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].*must be JSON"):
        client.chat.completions.create(messages=[*TALK, broken], **FIXED)


# --- /v1/responses -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_response_is_the_answer_of_a_chat(client: Any) -> None:
    options = {"temperature": 0, "model": "tiny"}
    system = {"role": "system", "content": "be brief"}
    expected = client.chat.completions.create(messages=[system, *TALK], max_tokens=9, **options)
    for asked in (
        "a pet",
        TALK,
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a pet"}]}],
    ):
        answer = client.responses.create(
            input=asked, instructions="be brief", max_output_tokens=9, **options
        )
        assert answer.output_text == expected.choices[0].message.content
        assert answer.usage.input_tokens == expected.usage.prompt_tokens
        assert answer.usage.output_tokens == expected.usage.completion_tokens
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "pet"}]
    talk: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    expected = client.chat.completions.create(messages=talk, max_tokens=9, **options)
    answer = client.responses.create(input=talk, max_output_tokens=9, **options)
    assert answer.output_text == expected.choices[0].message.content


@pytest.mark.slow
def test_a_stream_has_openais_events_in_their_order(client: Any) -> None:
    options: Any = {"model": "tiny", "input": "a pet", "temperature": 0, "max_output_tokens": 9}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events[4:-4])
    assert text == whole.output_text == events[-4].text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 9
    assert len({events[0].response.id, events[-1].response.id}) == 1


def test_the_clients_own_helper_reads_a_stream(client: Any) -> None:
    form: Any = {"type": "json_schema", "name": "pet", "schema": SCHEMA}
    with client.responses.stream(model="tiny", input="a pet", text={"format": form}) as helper:
        assert [event.type for event in helper][-1] == "response.completed"
        assert is_pet(helper.get_final_response().output_text)


def test_a_response_has_the_format_that_is_asked_for(client: Any) -> None:
    form: Any = {"type": "json_schema", "name": "pet", "schema": SCHEMA}
    answer = client.responses.create(
        input="a pet", text={"format": form}, model="tiny", temperature=1.5
    )
    assert answer.status == "completed"
    assert is_pet(answer.output_text)


def test_the_asynchronous_client_gets_responses_too(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            options: Any = {"model": "tiny", "input": "a pet", "temperature": 0}
            options["max_output_tokens"] = 5
            whole = await client.responses.create(**options)
            text = ""
            async for event in await client.responses.create(stream=True, **options):
                if event.type == "response.output_text.delta":
                    text += event.delta
            assert text == whole.output_text

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"store": True}, "store", "answers are not stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "c"}, "conversation", "not stored"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools is not supported"),
        ({"background": True}, "background", "background is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "text.format",
            "Invalid type: x",
        ),
        ({"text": {"verbosity": "low"}}, "text", "verbosity is not supported"),
        ({"input": [{"type": "reasoning"}]}, "input", r"input\[0\] must be a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text here"),
        ({"input": []}, "input", "input is empty"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be .* at least 1"),
        (
            {"max_output_tokens": 1, "min_tokens": 2},
            "min_tokens",
            "min_tokens 2 is above max_output_tokens 1; lower it, or raise max_output_tokens",
        ),
        ({"stream_options": {"includes_usage": True}}, None, "'stream_options.includes_usage'"),
        ({"inputs": "a"}, None, "unrecognized"),
    ],
    ids=str,
)
def test_what_a_response_cannot_be(
    extra: dict[str, Any], param: str | None, message: str, client: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(input="a", model="tiny", extra_body=extra)
    assert caught.value.body["param"] == param
