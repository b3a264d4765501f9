"""Results through messages: equal on the other side, and nothing but results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ostinato.errors import (
    CaptureError,
    CaptureOutOfMemoryError,
    CollectiveError,
    ConfigError,
    RankFailedError,
    RequestError,
)
from ostinato.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta
from ostinato.ranks.result_message import decode_result, encode_error, encode_result

COMPLETION = CompletionOutput(
    index=1,
    text='\ud83d "\u4e2d',  # half of a character, too
    token_ids=[1, 2**40],
    logprobs=[
        {7: Logprob(logprob=-0.1, decoded_token="a"), 8: Logprob(logprob=float("-inf"))},
        {},
    ],
    cumulative_logprob=-1e-300,
    finish_reason="stop",
    stop_reason="type",
)
OUTPUT = RequestOutput(
    request_id="request-1",
    prompt=None,
    prompt_token_ids=[3],
    outputs=[CompletionOutput(index=0), COMPLETION],
    num_cached_tokens=16,
)


@pytest.mark.parametrize(
    "result",
    [[], [OUTPUT, OUTPUT], None, TextDelta(prompt_index=0, index=1, text="x", token_ids=[4])],
    ids=["nothing", "outputs", "end", "delta"],
)
def test_results_arrive_as_they_were(result: Any) -> None:
    arrived = decode_result(encode_result(result))
    assert arrived == pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("division by zero"),
        KeyError("a key"),
        RequestError("no such token"),
        RankFailedError("rank 1 failed", 1),
        CaptureError("refused", operator="aten::item", source="model.py:3"),
        CaptureOutOfMemoryError("no memory"),
        FileNotFoundError(2, "No such file"),
        ValueError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        decode_result(encode_error(error))
    assert type(caught.value) is type(error)
    assert (caught.value.args, vars(caught.value)) == (error.args, vars(error))
    assert str(caught.value) == str(error)


class OwnError(Exception):
    pass


class LookupError(Exception):  # a name that Python has, for another type
    pass


@pytest.mark.parametrize(
    "error",
    [
        OwnError("mine"),
        LookupError("mine"),
        ValueError(object()),
        KeyboardInterrupt("now"),
        ExceptionGroup("several", [ValueError("one")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_described(error: BaseException) -> None:
    with pytest.raises(RankFailedError, match="rank 0 raised") as caught:
        decode_result(encode_error(error))
    assert caught.value.rank == 0
    assert f"{type(error).__name__}: {error}" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(ValueError("x")),
        b"",
        b"\xff",
        b'{"type": "Popen", "args": "true"}',
        b'{"type": "TextDelta", "nothing": 1}',
        b'{"error": "eval", "args": ["1"], "attributes": []}',
        b'{"error": "SystemExit", "args": [], "attributes": []}',
        b'{"error": "__import__", "args": ["os"], "attributes": []}',
        b'{"error": 3}',
        b'{"x": 1}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(CollectiveError, match=f"a message of {len(data)} bytes is not a result"):
        decode_result(data)


def test_results_of_other_types_are_not_sent() -> None:
    with pytest.raises(TypeError, match="a ConfigError cannot be shared between ranks"):
        encode_result([ConfigError("x")])
