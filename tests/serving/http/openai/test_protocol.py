"""Bodies of requests: what is wrong with a large one is said once, not for each of its elements."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from ostinato.serving.http.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from ostinato.serving.http.openai.responses.response_request import ResponseRequest

MANY = 1000
NAMES = {f"k{number}": 1 for number in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": [[None]] * MANY}),
        (CompletionRequest, {"prompt": "a", **NAMES}),
        (CompletionRequest, {"prompt": "a", "logit_bias": NAMES}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [None] * MANY}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stream": True, "stream_options": NAMES}),
        (ChatRequest, {"messages": [1] * MANY}),
        (CompletionRequest, {"prompt": [["a"]] * 17_000}),
        (EmbeddingRequest, {"input": [None] * MANY}),
        (EmbeddingRequest, {"input": [["a"]] * 2049}),
        (DetokenizeRequest, {"tokens": [None] * MANY}),
        (ResponseRequest, {"input": [1] * MANY}),
        (ResponseRequest, {"input": "a", "metadata": NAMES}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else None,
)
def test_large_bodies_have_few_errors(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**body)
    assert caught.value.error_count() < 10
