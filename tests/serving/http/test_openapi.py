"""The OpenAPI document: schemathesis asks by it, and every answer is one that it lists."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from ostinato import AsyncLLM
from ostinato.serving.http.app import create_app
from ostinato.serving.http.openapi.answer_schemas import (
    ChatAnswer,
    CompletionAnswer,
    TokenizeAnswer,
)
from ostinato.serving.http.openapi.response_schemas import ResponseAnswer
from ostinato.serving.http.server_config import ServerConfig

schemathesis = pytest.importorskip("schemathesis")  # its own plugin is off, in pyproject.toml

OPERATIONS = [
    *(f"POST /v1/{name}" for name in ("completions", "chat/completions", "responses")),
    *("POST /v1/embeddings", "POST /tokenize", "POST /detokenize"),
    *("GET /v1/models", "GET /v1/models/{name}", "GET /dashboard/data"),
    *("GET /health", "GET /version", "GET /metrics"),
]


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.update(base_url=url)
    return schema


def test_all_routes_are_listed(schema: Any) -> None:
    found = {each.ok().label for each in schema.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_answers_are_those_of_the_document(schema: Any, name: str, mode: str) -> None:
    method, _, path = name.partition(" ")
    if mode == "NEGATIVE" and method == "GET":
        return  # there is nothing to get wrong
    cases = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode[mode])

    @given(case=cases)
    @settings(
        max_examples=12 if method == "POST" else 3,
        suppress_health_check=[*HealthCheck],
    )
    def ask(case: Any) -> None:
        # What the document allows may still be more than this model can do.
        case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance])

    ask()


TALK = {"messages": [{"role": "user", "content": "w1"}]}


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v1/completions", {"prompt": "w1", "n": 2, "logprobs": 2}, CompletionAnswer),
        ("/v1/chat/completions", TALK, ChatAnswer),
        ("/v1/chat/completions", {**TALK, "logprobs": True, "top_logprobs": 2}, ChatAnswer),
        ("/v1/responses", {"input": "w1", "metadata": {"a": "b"}}, ResponseAnswer),
        ("/v1/responses", {"input": "w1", "max_output_tokens": 2}, ResponseAnswer),
        ("/tokenize", {"prompt": "w1"}, TokenizeAnswer),
    ],
    ids=str,
)
def test_whole_answers(url: str, path: str, body: dict[str, Any], answer: Any) -> None:
    """schemathesis seldom finds a prompt that the model takes."""
    response = httpx.post(url + path, json=body, timeout=60)
    answer.model_validate_json(response.text, strict=True)


def test_errors_are_400_not_422(engine: AsyncLLM) -> None:
    document = create_app(engine, ServerConfig()).openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert "security" not in operation
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_key_is_documented(engine: AsyncLLM) -> None:
    document = create_app(engine, ServerConfig(api_key="opensesame")).openapi()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
