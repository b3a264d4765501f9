"""What may be asked of structured output, and how a mistake is answered."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import ConfigError, SamplingParams, StructuredOutputsParams
from ostinato.structured.params import MAX_GRAMMAR_CHARACTERS


def test_a_schema_may_be_a_dict_or_its_text_and_keeps_the_order_of_its_keys() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_dict = StructuredOutputsParams(json=schema)
    as_text = StructuredOutputsParams(json='{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert as_dict == as_text
    assert hash(as_dict) == hash(as_text)
    assert as_dict.schema == '{"type":"object","properties":{"b":{},"a":{}}}'
    schema["type"] = "array"  # the caller's dict is the caller's
    assert as_dict == as_text


def test_sampling_parameters_take_a_dict_too() -> None:
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("yes", "no"))
    assert SamplingParams().structured_outputs is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none of them"),
        ({"json_object": False}, "got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regex": 3}, "regex must be text, got 3"),
        ({"regex": ""}, "regex must be text, got ''"),
        ({"regex": "\ud800"}, "regex has lone surrogates"),
        (
            {"grammar": "a" * (MAX_GRAMMAR_CHARACTERS + 1)},
            "grammar exceeds the limit of 262,144",
        ),
        ({"choice": []}, r"choice must be a list of texts, got \[\]"),
        ({"choice": "yes"}, "choice must be a list of texts, got 'yes'"),
        ({"choice": ["yes", 3]}, "choice must be text, got 3"),
        (
            {"choice": ["a" * 200_000, "b" * 200_000]},
            "choice exceeds the limit of 262,144",
        ),
        ({"json": "{"}, "json must be a JSON schema, a dict or the text of one: Expecting"),
        ({"json": [1]}, r"json must be a JSON schema, a dict or the text of one, got \[1\]"),
        ({"json": {"const": float("nan")}}, "json must be a JSON schema"),
        ({"json": {"const": object()}}, "is not JSON"),
        ({"json_object": "yes"}, "json_object must be True or False, got 'yes'"),
        ({"regex": "a", "disable_any_whitespace": True}, "are for json, not for regex"),
        ({"regx": "a"}, "did you mean regex?"),
        ({"structural_tag": "{}"}, "write grammar"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        SamplingParams(structured_outputs=given)


def test_other_things_are_no_structure() -> None:
    with pytest.raises(ConfigError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="write structured_outputs=StructuredOutputsParams"):
        SamplingParams(guided_decoding={"json": {}})
