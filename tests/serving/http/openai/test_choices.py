"""The bodies of answers."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from ostinato.outputs import CompletionOutput, Logprob
from ostinato.serving.http.openai.answers import TextChoices


def test_of_tokens_with_one_text_the_first_counts() -> None:
    """Parts of characters have no text of their own; the sampled token must not lose its value."""
    row = {
        7: Logprob(logprob=-0.5, decoded_token="\ufffd"),
        8: Logprob(logprob=-2.0, decoded_token="\ufffd"),
        9: Logprob(logprob=-3.0, decoded_token="a"),
    }
    output = CompletionOutput(index=0, text="\ufffd", token_ids=[7], logprobs=[row])
    logprobs = TextChoices().whole(0, output)["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.5, "a": -3.0}]
