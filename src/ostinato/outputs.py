"""What generation returns, under the names known from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """A token's log-probability before penalties and temperature."""

    logprob: float
    decoded_token: str | None = None


# Per generated token: the sampled one first, then the most likely ones, by token id.
TokenLogprobs = dict[int, Logprob]


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt. ``token_ids`` include the token that ended it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and its completions, ``SamplingParams.n`` of them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What one step added to one completion; ``text`` may be empty while a word is incomplete."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
