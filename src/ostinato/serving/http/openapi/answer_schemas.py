"""The bodies of answers, for the OpenAPI document. Routes build plain dicts; a test compares them
with these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ostinato.report.records import EagerRow, GraphRow, Plan
from ostinato.serving.overview import InFlight
from ostinato.serving.records import EngineStats


class Answer(BaseModel):
    """A body without fields beyond those that are listed."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error, as OpenAI has it."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None


class _Generated(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageAnswer


class CompletionAnswer(_Generated):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class LikelyToken(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class EmbeddingRow(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage


class ModelAnswer(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int


class ModelsAnswer(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Answer):
    prompt: str


class HealthAnswer(Answer):
    status: Literal["ok"]


class VersionAnswer(Answer):
    version: str


class DashboardAnswer(BaseModel):
    """What the dashboard shows; its rows have a few fields more."""

    version: str
    clock_s: float
    uptime_s: float
    model: str
    adapters: list[str]
    task: Literal["generate", "embed", "classify"]
    max_model_len: int
    has_chat_template: bool
    latency: dict[str, Any]
    stats: EngineStats
    plan: Plan
    graphs: list[GraphRow]
    eager: list[EagerRow]
    in_flight: list[InFlight]
