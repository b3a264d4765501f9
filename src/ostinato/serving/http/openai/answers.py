"""The bodies of answers, in OpenAI's form: plain dicts, since one is built for every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ostinato import __version__
from ostinato.outputs import CompletionOutput, Logprob, TextDelta, TokenLogprobs

_FINGERPRINT = f"ostinato-{__version__}"


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request: of its prompts, each counted once, and generated."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What all parts of one answer share. ``kind``: "chat.completion" or "text_completion"."""

    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid4().hex)

    def of(self, choices: list[dict[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        chat = self.kind == "chat.completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}",
            "object": f"{self.kind}.chunk" if chat and is_part else self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }


class TextChoices:
    """Choices of ``/v1/completions``, whole or in parts; counts characters for ``text_offset``."""

    kind = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def whole(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return self._choice(index, output)

    def part(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self._choice(index, delta)

    def _choice(self, index: int, output: CompletionOutput | TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": None if output.logprobs is None else self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, index: int, output: CompletionOutput | TextDelta) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        tokens, values, tops, offsets = [], [], [], []
        for token_id, row in zip(output.token_ids, output.logprobs or (), strict=True):
            text = _text(token_id, row[token_id])
            tokens.append(text)
            values.append(row[token_id].logprob)
            likely: dict[str, float] = {}
            for each, value in row.items():  # the sampled token comes first
                likely.setdefault(_text(each, value), value.logprob)
            tops.append(likely)
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatChoices:
    """Choices of ``/v1/chat/completions``, whole or in parts; ``num_top``: logprobs per token."""

    kind = "chat.completion"

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top

    def first(self, index: int) -> dict[str, Any]:
        """The part that says who speaks."""
        return self._part(index, {"role": "assistant", "content": ""}, None, None, None)

    def whole(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def part(self, index: int, delta: TextDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta)
        return self._part(index, content, logprobs, delta.finish_reason, delta.stop_reason)

    @staticmethod
    def _part(
        index: int, delta: dict[str, Any], logprobs: Any, finish_reason: Any, stop_reason: Any
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(self, output: CompletionOutput | TextDelta) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        rows = zip(output.token_ids, output.logprobs, strict=True)
        return {"content": [self._token(token, row) for token, row in rows], "refusal": None}

    def _token(self, token_id: int, row: TokenLogprobs) -> dict[str, Any]:
        likely = sorted(row.items(), key=lambda each: -each[1].logprob)[: self._num_top]
        return {
            **_described(token_id, row[token_id]),
            "top_logprobs": [_described(token, value) for token, value in likely],
        }


Choices = TextChoices | ChatChoices


def _text(token_id: int, value: Logprob) -> str:
    return f"token_id:{token_id}" if value.decoded_token is None else value.decoded_token


def _described(token_id: int, value: Logprob) -> dict[str, Any]:
    text = _text(token_id, value)
    # A token that is part of a character has no text from which its bytes could be told.
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": value.logprob, "bytes": data}


def listed(objects: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A list of objects, as OpenAI wraps them."""
    return {"object": "list", "data": list(objects), **more}
