"""Whatever a body holds, the answer is one, or an error of the client's in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import LLM, SamplingParams
from ostinato.serving.http.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from ostinato.serving.http.openai.responses.response_request import ResponseRequest

ROUTES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# A valid start, so that the rest is reached; and no long answers.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "w1", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "w1"},
    "/v1/responses": {"input": "w1", "max_output_tokens": 2},
    "/tokenize": {"prompt": "w1"},
    "/detokenize": {"tokens": [1]},
}
TEXTS = st.sampled_from(["", "w1", "tiny", "poet", "\ud800", "\0", "w1 " * 300, "/etc/passwd"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 0.5, 1e308, -0.0, 2**31, 2**63, 10**400, float("nan")])
# What structures and tools are made of.
WORDS = st.sampled_from(["json_schema", "json_object", "function", "required", "f", "a(", "w[12]"])
NAMES = st.sampled_from(
    [
        *("role", "content", "type", "text", "1", "json", "regex", "choice", "grammar", "schema"),
        *("json_schema", "function", "name", "parameters", "format", "tool_calls", "arguments"),
    ]
)
SMALL = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, WORDS)
VALUES = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=3),
    ),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = st.sampled_from([*sorted(ROUTES[path].model_fields), "nothing"])
    body = draw(st.dictionaries(names, VALUES, max_size=3))
    return path, {**VALID[path], **body}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.slow
@given(request=requests())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_server(client: httpx.Client, request: tuple[str, Any]) -> None:
    path, body = request
    data = json.dumps(body).encode()
    response = client.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(error["message"]) < 1000


@pytest.mark.slow
def test_it_still_answers(llm: LLM, client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "w1", "temperature": 0}).json()
    (wanted,) = llm.generate(["w1"], SamplingParams(temperature=0))
    assert answer["choices"][0]["text"] == wanted.outputs[0].text
