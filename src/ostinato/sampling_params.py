"""``SamplingParams``: how the tokens of one request are sampled, and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ostinato import other_engines
from ostinato.errors import ConfigError
from ostinato.options import option, user_options
from ostinato.quoting import shown
from ostinato.structured.params import StructuredOutputsParams, structured_outputs

# Larger values have no known use, and would delay or exhaust an engine.
MAX_N = 16_384
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 16_384
MAX_STOP_CHARACTERS = 131_072  # of all stop strings together
MAX_LOGPROBS = 64
_LARGEST_FLOAT = sys.float_info.max


@user_options(example="temperature", foreign=other_engines.SAMPLING_OPTIONS)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends. Names and meanings are vLLM's.

    The ``MAX_`` constants of ``ostinato.sampling_params`` are the limits.
    """

    n: int = option(1, "Number of completions of the prompt.")
    temperature: float = option(1.0, "0 is greedy; larger is more random.")
    top_k: int = option(0, "Sample from this many of the most likely tokens; 0 or -1: from all.")
    top_p: float = option(
        1.0, "Sample from the most likely tokens whose probabilities add up to this."
    )
    min_p: float = option(0.0, "Drop tokens less likely than this times the most likely one.")
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens already in the output, in [-2, 2]."
    )
    frequency_penalty: float = option(
        0.0, "Subtracted once per occurrence of the token in the output, in [-2, 2]."
    )
    repetition_penalty: float = option(
        1.0, "Above 1: makes tokens in the prompt and the output less likely, by this factor."
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "Added to the logits, by token id, in [-100, 100]."
    )
    seed: int | None = option(
        None,
        "Seed of the request's random numbers; None draws one. In float32 the tokens then depend "
        "only on the prompt and these parameters, whatever else is in the batch; in bfloat16 and "
        "float16 the rounding of another batch shape can change them.",
    )
    max_tokens: int | None = option(16, "Longest output. None: up to the model's limit.")
    min_tokens: int = option(0, "Minimum tokens before the output may end.")
    stop: str | Sequence[str] = option((), "A string, or several, at which the output ends.")
    stop_token_ids: Sequence[int] = option((), "Tokens at which the output ends.")
    include_stop_str_in_output: bool = option(False, "Keep the stop string in the text.")
    ignore_eos: bool = option(False, "Continue after the model's end-of-sequence token.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    logprobs: int | None = option(
        None,
        "Return the log-probabilities of the sampled token and of this many of the most likely "
        "tokens, before penalties and temperature.",
    )
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = option(
        None,
        "The form that the text must have: StructuredOutputsParams(json=...), or regex, choice, "
        "grammar. Its end ends the output.",
    )

    def __post_init__(self) -> None:
        # Options come from the command line and from requests, so types are checked too.
        _check_int("n", self.n, at_least=1)
        if self.n > MAX_N:
            raise ConfigError(
                f"n must be at most {MAX_N}, got {shown(self.n)}; send the prompt several times"
            )
        _check_number("temperature", self.temperature, "at least 0", lambda v: v >= 0)
        if type(self.top_k) is not int or self.top_k < -1:
            raise ConfigError(
                f"top_k must be a positive integer, or 0 for all, got {shown(self.top_k)}"
            )
        _check_number("top_p", self.top_p, "in (0, 1]", lambda v: 0 < v <= 1)
        _check_number("min_p", self.min_p, "in [0, 1]", lambda v: 0 <= v <= 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), "in [-2, 2]", lambda v: -2 <= v <= 2)
        _check_number("repetition_penalty", self.repetition_penalty, "above 0", lambda v: v > 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, at_least=1)
        _check_int("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it, or "
                "raise max_tokens"
            )
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {shown(self.seed)}")
        if self.logprobs is not None and (
            type(self.logprobs) is not int or not 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            raise ConfigError(
                f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {shown(self.logprobs)}"
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        object.__setattr__(self, "structured_outputs", structured_outputs(self.structured_outputs))
        self._check_lists()

    def _check_lists(self) -> None:
        # Stored as plain immutable values, because a request outlives the caller's lists.
        given = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _as_tuple("stop", given, MAX_STOP_STRINGS)
        if any(not isinstance(text, str) or not text for text in stop):
            raise ConfigError(f"stop must be non-empty strings, got {shown(self.stop)}")
        num_characters = sum(map(len, stop))
        if num_characters > MAX_STOP_CHARACTERS:
            raise ConfigError(
                f"stop strings may have at most {MAX_STOP_CHARACTERS} characters together, got "
                f"{num_characters}"
            )
        if not all(_is_text(text) for text in stop):
            raise ConfigError(f"stop must be text without lone surrogates, got {shown(self.stop)}")
        object.__setattr__(self, "stop", stop)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if any(type(token) is not int or token < 0 for token in ids):
            raise ConfigError(f"stop_token_ids must be token ids, got {shown(self.stop_token_ids)}")
        object.__setattr__(self, "stop_token_ids", ids)
        if not isinstance(self.logit_bias, Mapping | None):
            raise ConfigError(f"logit_bias maps token ids to numbers, got {shown(self.logit_bias)}")
        bias = dict(self.logit_bias or {})
        if len(bias) > MAX_LOGIT_BIAS:
            raise ConfigError(
                f"logit_bias may have at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}"
            )
        for token, value in bias.items():
            if type(token) is not int or token < 0:
                raise ConfigError(
                    f"logit_bias maps token ids to numbers, got the key {shown(token)}"
                )
            _check_number(
                f"logit_bias[{shown(token)}]", value, "in [-100, 100]", lambda v: abs(v) <= 100
            )
        object.__setattr__(self, "logit_bias", bias)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """``structured_outputs``, which may be given as a dict."""
        assert not isinstance(self.structured_outputs, Mapping), "converted when built"
        return self.structured_outputs

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _as_tuple(name: str, value: object, most: int) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list, got {shown(value)}")
    try:
        items = tuple(islice(value, most + 1))  # an iterator may be infinite
    except TypeError:  # an array or a tensor of one number
        raise ConfigError(f"{name} must be a list, got {shown(value)}") from None
    if len(items) > most:
        raise ConfigError(f"{name} may have at most {most} entries, got more")
    return items


def _is_text(value: str) -> bool:
    """Whether the text has no lone surrogates: no model produces one, so it would never match."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _check_int(name: str, value: object, *, at_least: int) -> None:
    if type(value) is not int or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {shown(value)}")


def _check_number(name: str, value: object, allowed: str, holds: Callable[[float], bool]) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not abs(value) <= _LARGEST_FLOAT
        or not holds(value)
    ):
        raise ConfigError(f"{name} must be a number {allowed}, got {shown(value)}")
