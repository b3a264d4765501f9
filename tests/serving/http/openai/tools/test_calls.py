"""How models write tool calls, and reading them in parts of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling_models import VOCAB, save_spelling

from ostinato.outputs import CompletionOutput, TextDelta
from ostinato.serving.http.openai.tools.call_format import HERMES, LLAMA, CallFormat, format_of
from ostinato.serving.http.openai.tools.call_parser import Arguments, CallParser, CallStart, Content
from ostinato.serving.http.openai.tools.tool_choices import ToolChoices
from ostinato.serving.http.openai.tools.tool_request import ToolRequest
from ostinato.structured.grammars import Grammars

LLAMA_WORDS = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}. Do not use variables."
)
TEXTS: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    (HERMES, "Hello, you.", "Hello, you.", []),
    (HERMES, "", "", []),
    (HERMES, "a < b <tool_cal <tool_call", "a < b <tool_cal <tool_call", []),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>{"name": "g\\u00fc", "arguments": {}}</tool_call>\n',
        "Sure.\n",
        [("f", {"a": '}</tool_call>"'}), ("gü", {})],
    ),
    (HERMES, '<tool_call>{"arguments": [1], "name": "f"}</tool_call>', "", [("f", [1])]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
    (HERMES, "<tool_call>nonsense</tool_call> so", "<tool_call>nonsense</tool_call> so", []),
    (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (
        HERMES,
        '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>',
        [],
    ),
    (LLAMA, 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', []),
    (LLAMA, ' {"name": "f", "parameters": {"a": [{}]}}', "", [("f", {"a": [{}]})]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", {}), ("g", {"b": 2})],
    ),
    (LLAMA, '{"name": "f", "parameters": {}} ; so', " ; so", [("f", {})]),
    (LLAMA, '{"answer": 3}', '{"answer": 3}', []),
    (LLAMA, '{"name": "\\u12", "parameters": {}}', '{"name": "\\u12", "parameters": {}}', []),
    (
        LLAMA,
        '{"name": "f", "parameters": {}, "id": "}"} {"name": "g", "parameters": {"b": 2}, "n": {}}',
        "",
        [("f", {}), ("g", {"b": 2})],
    ),
    (LLAMA, '{"parameters": {"a": 1}, "name": "f"}', "", [("f", {"a": 1})]),
]


def read(form: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser, content, calls = CallParser(form), "", list[list[str]]()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallStart):
            calls.append([part.name, ""])
        else:
            assert isinstance(part, Arguments)
            calls[-1][1] += part.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 9)))
def test_any_split_reads_the_same(case: Any, sizes: list[int]) -> None:
    form, text, content, calls = case
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(form, [*pieces, rest]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "on') == [
        CallStart("f"),
        Arguments('{"a": "on'),
    ]
    assert parser.feed("e") == [Arguments("e")]
    assert parser.feed('"}}</tool_call>') == [Arguments('"}')]
    assert parser.finish() == []


def test_a_chat_that_may_call_tools_streams_content_and_calls() -> None:
    """What a model may choose to write under tool_choice "auto", in deltas of odd sizes."""
    text = 'Let me see.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>'
    text += '{"name": "g", "arguments": {}}</tool_call>'
    choices = ToolChoices(0, ToolRequest(tools=[], form=HERMES))
    parts = []
    for start in range(0, len(text), 7):
        end = start + 7 >= len(text)
        delta = TextDelta(
            prompt_index=0,
            index=0,
            text=text[start : start + 7],
            token_ids=[1],
            finish_reason="stop" if end else None,
        )
        parts.append(choices.part(0, delta))
    content = "".join(part["delta"].get("content", "") for part in parts)
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    names = [call["function"]["name"] for call in calls if "id" in call]
    arguments = ["", ""]
    for call in calls:
        arguments[call["index"]] += call["function"]["arguments"]
    assert (content, names, arguments) == ("Let me see.", ["f", "g"], ['{"a": 1}', "{}"])
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]

    output = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason="stop")
    whole = ToolChoices(0, ToolRequest(tools=[], form=HERMES)).whole(0, output)
    assert whole["message"]["content"] == "Let me see."
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["f", "g"]
    assert whole["finish_reason"] == "tool_calls"
    plain = CompletionOutput(index=0, text="No.", token_ids=[1], finish_reason="stop")
    answer = ToolChoices(0, ToolRequest(tools=[], form=HERMES)).whole(0, plain)
    assert (answer["message"]["content"], answer["finish_reason"]) == ("No.", "stop")
    assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('{{ tools }} <tool_call>\\n{"name": ...', HERMES),
        (f"{{{{ '{LLAMA_WORDS}' }}}}", LLAMA),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("<tool_call>\\n<function=name>", None),
        ("<tool_call>{function-name}\\n<arg_key>", None),
    ],
)
def test_templates_state_their_format(template: str, form: CallFormat | None) -> None:
    assert format_of(template) is form


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_structures_take_calls_and_nothing_else(
    form: CallFormat, tmp_path_factory: pytest.TempPathFactory
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("llguidance")
    path = save_spelling(tmp_path_factory.mktemp("spelling"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    grammars = Grammars(tokenizer, VOCAB, frozenset({tokenizer.eos_token_id}))
    # As pydantic writes schemas: what it refers to is in the schema itself.
    size = {"$defs": {"Size": {"enum": [1, 2]}}, "properties": {"size": {"$ref": "#/$defs/Size"}}}
    parameters = {"type": "object", "required": ["size"], **size}
    tools = [
        {"function": {"name": "one", "parameters": parameters}},
        {"function": {"name": "two"}},
    ]
    structure = form.structure(tools, tokenizer, several=False)
    key = form.arguments_key

    def takes(name: str, arguments: str) -> bool:
        call = f'{{"name": "{name}", "{key}": {arguments}}}'
        text = f"{form.opening}\n{call}\n{form.closing}" if form.opening else call
        constraint = grammars.constraint(structure, ignore_eos=False)
        constraint.follow(tokenizer.encode(text))
        return constraint.failure is None and constraint.is_complete

    assert takes("one", '{"size": 2}')
    assert takes("two", "{}")
    assert not takes("one", '{"size": 3}')
    assert not takes("one", "{}")
    assert not takes("three", "{}")
