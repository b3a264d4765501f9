"""The bodies of requests, as OpenAI's clients send them.

A field that OpenAI does not have is refused, so that a misspelt one is noticed; except those of
``SamplingParams``, which vLLM's clients send too. A field of OpenAI's that is not supported is
refused if it would change the answer, and accepted otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from ostinato.quoting import shown
from ostinato.sampling_params import MAX_LOGIT_BIAS, MAX_N

T = TypeVar("T")


class _FailFast(FailFast):
    __hash__ = object.__hash__  # in a union, which pydantic's own cannot be


# A body may have millions of elements. An error for each would take minutes, in the event loop.
Many: TypeAlias = Annotated[list[T], _FailFast()]

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    # What is refused, with the values that ask for nothing.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Leave out all fields that do not exist but the first, which is the one to be named."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: value[name] for name in cls.model_fields if name in value}
        unknown = next(name for name in value if name not in cls.model_fields)
        return {**known, unknown: None}

    @field_validator("*")
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        harmless = cls.refused.get(name, (value,))
        if not any(value == each and type(value) is type(each) for each in harmless):
            raise ValueError(f"{name} is not supported here, got {shown(value)}; leave it out")
        return value


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; there is none


class _Sampled(Body):
    """What completions and chats have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # Ours, and vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # What the answer must look like: OpenAI's, vLLM's, and what vLLM had before.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias may have at most {MAX_LOGIT_BIAS} tokens, got {len(value)}"
            )
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams; set stream to true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Sampled):
    """The body of ``/v1/completions``."""

    refused = {"echo": NOTHING, "suffix": NOTHING}

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, list) and len(value) > MAX_N and not isinstance(value[0], int):
            raise ValueError(
                f"there are {len(value)} prompts, but a request may have at most {MAX_N}; split it "
                "into several requests"
            )
        try:
            return check(value)
        except ValidationError:
            raise ValueError(
                "prompt must be a text, token ids, or a list of only texts or only lists of token "
                f"ids, got {shown(value)}"
            ) from None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is {self.best_of}, but must equal n; leave it out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as a list even if there is one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class ChatRequest(_Sampled):
    """The body of ``/v1/chat/completions``."""

    refused = {
        "audio": NOTHING,
        "function_call": (*NOTHING, "none"),
        "functions": NOTHING,
        "modalities": (*NOTHING, ["text"]),
        "reasoning_effort": NOTHING,
        "store": NOTHING,
        "verbosity": NOTHING,
        "web_search_options": (None,),
    }

    messages: Annotated[Many[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # These change no answer.
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true")
        return self


_MOST_INPUTS = 2048  # of one request for embeddings, as OpenAI has it


class EmbeddingRequest(Body):
    """The body of ``/v1/embeddings``."""

    model: str | None = None
    input: str | Many[str] | Many[int] | Many[Many[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    truncate: bool = False  # LLM.embed's
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], int):
            return value
        if isinstance(value, list) and not 0 < len(value) <= _MOST_INPUTS:
            raise ValueError(f"input has {len(value)} texts; give 1 to {_MOST_INPUTS} of them")
        return value


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and self.chat_template_kwargs is not None:
            raise ValueError("chat_template_kwargs are for messages; leave them out")
        return self


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Many[int]
