"""What ``SamplingParams`` accepts, and its errors for what it does not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from ostinato.errors import ConfigError
from ostinato.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NAN, INF = math.nan, math.inf


def bad(field: str, values: list[Any], message: str) -> list[Any]:
    return [pytest.param(field, value, message, id=f"{field}={value!r:.20}") for value in values]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *bad("n", [0, -1, 1.0, True, "1", None], "n must be an integer of at least 1, got {}"),
        *bad(
            "temperature",
            [-0.1, NAN, INF, -INF, True, "hot", None],
            "temperature must be a number at least 0, got {}",
        ),
        *bad(
            "top_k",
            [-2, 1.5, True, "5", None],
            "top_k must be a positive integer, or 0 for all, got {}",
        ),
        *bad(
            "top_p",
            [0, 0.0, -0.5, 1.0001, NAN, False, "1", None],
            "top_p must be a number in (0, 1], got {}",
        ),
        *bad("min_p", [-1e-9, 1.1, NAN, "0", None], "min_p must be a number in [0, 1], got {}"),
        *bad(
            "presence_penalty",
            [-2.1, 2.1, NAN, INF, "1", None],
            "presence_penalty must be a number in [-2, 2], got {}",
        ),
        *bad(
            "frequency_penalty",
            [-2.1, 2.1, NAN, -INF, True, None],
            "frequency_penalty must be a number in [-2, 2], got {}",
        ),
        *bad(
            "repetition_penalty",
            [0, -1.0, NAN, INF, "1", None],
            "repetition_penalty must be a number above 0, got {}",
        ),
        *bad(
            "max_tokens",
            [0, -1, 1.5, True, "16"],
            "max_tokens must be an integer of at least 1, got {}",
        ),
        *bad(
            "min_tokens",
            [-1, 0.0, False, "0", None],
            "min_tokens must be an integer of at least 0, got {}",
        ),
        *bad("seed", [-1, 2**63, 1.0, True, "7"], "seed must be an integer in [0, 2**63), got {}"),
        *bad(
            "logprobs",
            [-1, 1.0, True, "1", MAX_LOGPROBS + 1],
            f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {{}}",
        ),
        *bad("stop", ["", ["a", ""], ["a", 1]], "stop must be non-empty strings, got {}"),
        *bad(
            "stop_token_ids",
            [[-1], [1, 2.0], [True], ["1"]],
            "stop_token_ids must be token ids, got {}",
        ),
    ],
)
def test_an_invalid_value_is_named_with_its_field(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.format(repr(value))) + "$"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["12", b"12", 12])
def test_stop_token_ids_are_a_list(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"stop_token_ids must be a list, got {value!r}"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_an_array_of_one_number_is_no_list(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a list, got array\(4\)"):
        SamplingParams(**{name: np.array(4)})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[(1, 2.0)], "1:2", 3])
def test_a_logit_bias_is_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError, match="logit_bias maps token ids to numbers, got ") as raised:
        SamplingParams(logit_bias=value)
    assert repr(value) in str(raised.value)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(ConfigError, match="min_tokens 9 is above max_tokens 8; lower it"):
        SamplingParams(min_tokens=9, max_tokens=8)
    SamplingParams(min_tokens=8, max_tokens=8)
    SamplingParams(min_tokens=10_000, max_tokens=None)


def test_too_many_stop_token_ids() -> None:
    SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS))
    with pytest.raises(
        ConfigError, match=f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} entries"
    ):
        SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1))


def test_logit_bias_entries() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    with pytest.raises(
        ConfigError, match=f"logit_bias may have at most {MAX_LOGIT_BIAS} tokens, got"
    ):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    for key in (-1, "7", True, 1.0):
        with pytest.raises(ConfigError, match=f"maps token ids to numbers, got the key {key!r}"):
            SamplingParams(logit_bias={key: 0.0})  # type: ignore[dict-item]
    for value in (100.5, -101, NAN, INF, "1", None):
        message = re.escape(f"logit_bias[7] must be a number in [-100, 100], got {value!r}")
        with pytest.raises(ConfigError, match=message):
            SamplingParams(logit_bias={7: value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "accepted",
    [
        {"n": 128},
        {"temperature": 0},
        {"temperature": 1e-9},
        {"temperature": 100},
        {"top_k": -1},
        {"top_k": 1},
        {"top_k": 10**6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 50},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 1: 100}},
        {"stop": ["a", "b"], "stop_token_ids": [0, 5]},
    ],
    ids=str,
)
def test_the_edges_of_what_is_allowed(accepted: dict[str, Any]) -> None:
    params = SamplingParams(**accepted)
    for name, value in accepted.items():
        kept = getattr(params, name)
        assert (list(kept) if isinstance(value, list) else kept) == value


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_the_callers_lists_can_change_afterwards() -> None:
    stop, ids, bias = ["end"], [3], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("more")
    ids.append(4)
    bias[5] = 6.0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {1: 2.0}


def test_a_single_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_unknown_and_positional_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError):
        SamplingParams(1)  # type: ignore[misc]


def test_it_is_frozen_and_replace_checks_again() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match="top_p must be"):
        dataclasses.replace(params, top_p=2.0)
