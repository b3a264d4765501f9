"""What generation and pooling return, under the names known from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """A token's log-probability (``logprob``), before penalties and temperature.

    ``decoded_token``: its text, with the space it begins with; None for models without a tokenizer.
    """

    logprob: float
    decoded_token: str | None = None


# Per generated token: the sampled one first, then the most likely ones, by token id.
TokenLogprobs = dict[int, Logprob]


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    ``index``: which of the request's ``n``. ``text`` and ``token_ids``: the answer; the ids include
    the token that ended it. ``logprobs``: a dict per token, from token id to ``Logprob``, with the
    sampled token first; None unless asked for, as is ``cumulative_logprob``, their sum.
    ``finish_reason``: "stop", "length" or "abort"; None while it runs. ``stop_reason``: the stop
    string or token id that ended it; None for the end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and its completions.

    ``request_id``: unique in the engine. ``prompt``: its text; None if it was given as token ids.
    ``prompt_token_ids``: what the model saw. ``outputs``: ``SamplingParams.n`` completions.
    ``num_cached_tokens``: tokens of the prompt whose keys and values were in the KV cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What one step added to one completion.

    ``prompt_index``: which prompt of the call. ``index``: which of its ``n`` completions. ``text``
    can be empty while a character is incomplete. ``token_ids``: the new ones. ``logprobs``: theirs,
    as in ``CompletionOutput``; None unless asked for. ``finish_reason`` and ``stop_reason``: set in
    the last delta of a completion.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """A prompt and its ``embedding``: one row of float32 numbers on the CPU.

    ``prompt``: its text; None if it was given as token ids. ``prompt_token_ids``: what the model
    saw.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ScoreOutput:
    """How well a document matches its query (``score``); more is better.

    ``prompt_token_ids``: what the model saw: both as one sequence, or the document alone.
    """

    prompt_token_ids: list[int]
    score: float


@dataclass(frozen=True, kw_only=True)
class ClassificationOutput:
    """A prompt and the probability of each label, by name, in the model's order (``probs``).

    ``prompt`` and ``prompt_token_ids`` are as in ``EmbeddingOutput``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    probs: dict[str, float]

    @property
    def label(self) -> str:
        """The most likely label."""
        return max(self.probs, key=self.probs.__getitem__)
