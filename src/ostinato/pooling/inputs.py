"""Turns users' prompts, queries and documents into sequences of tokens, or names the bad one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import RequestError
from ostinato.pooling.runner import Tokens
from ostinato.quoting import shown
from ostinato.text.prompts import (
    check_num_tokens,
    check_text,
    check_token_ids,
    encode_pair,
    list_prompts,
    read_prompt,
)


@dataclass(frozen=True, kw_only=True)
class Input(Tokens):
    """One sequence, and its ``text`` if it was given as text."""

    text: str | None = None


@dataclass(frozen=True)
class InputReader:
    """Reads for a model with ``vocab_size`` tokens and sequences of up to ``max_len``.

    ``lower_case``: the checkpoint asks for texts in lower case.
    """

    tokenizer: Any
    max_len: int
    vocab_size: int
    lower_case: bool

    def prompts(
        self, prompts: Any, *, truncate: bool, one: str = "the prompt", several: str = "prompts"
    ) -> list[Input]:
        """One prompt or several, in any form that ``LLM.generate`` takes."""
        return [
            self._read(name, prompt, truncate)
            for name, prompt in list_prompts(prompts, one=one, several=several)
        ]

    def queries(
        self, query: Any, documents: Any, *, truncate: bool
    ) -> tuple[list[Input], list[Input]]:
        """One query or one for each document, and the documents."""
        queries = self.prompts(query, truncate=truncate, one="the query", several="queries")
        theirs = self.prompts(documents, truncate=truncate, one="the document", several="documents")
        _check_counts(len(queries), len(theirs))
        return queries, theirs

    def pairs(self, query: Any, documents: Any, *, truncate: bool, types: bool) -> list[Input]:
        """Each document as one sequence with its query; ``types``: mark which is which."""
        if self.tokenizer is None:
            raise RequestError("score needs a tokenizer to join two texts, and this model has none")
        queries = _texts("query", query)
        theirs = _texts("documents", documents)
        _check_counts(len(queries), len(theirs))
        if len(queries) == 1:
            queries *= len(theirs)
        inputs = []
        for number, pair in enumerate(zip(queries, theirs, strict=True)):
            name = f"documents[{number}] with its query"
            first, second = map(_lowered, pair) if self.lower_case else pair
            ids, marks = encode_pair(
                name, (first, second), self.tokenizer, self.max_len, truncate=truncate
            )
            self._check(name, ids)
            inputs.append(Input(token_ids=ids, token_types=marks if types else None))
        return inputs

    def _read(self, name: str, prompt: Any, truncate: bool) -> Input:
        given = _lowered(prompt) if self.lower_case else prompt
        text, ids = read_prompt(
            name, given, self.tokenizer, self.max_len, num_generated=0, truncate=truncate
        )
        self._check(name, ids)
        return Input(token_ids=ids, text=text)

    def _check(self, name: str, token_ids: list[Any]) -> None:
        check_token_ids(name, token_ids, self.vocab_size, self.tokenizer)
        check_num_tokens(name, len(token_ids), self.max_len, num_generated=0)


def _lowered(prompt: Any) -> Any:
    """A prompt with its text, if it is text, in lower case."""
    if isinstance(prompt, Mapping):
        return {key: _lowered(value) for key, value in prompt.items()}
    return prompt.lower() if isinstance(prompt, str) else prompt


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts:
        raise RequestError(f"{name} must be text or a list of texts, got {shown(given)}")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(
                f"{name}[{number}] must be text, since this model reads a query and a document as "
                f"one sequence, got {shown(text)}"
            )
        check_text(f"{name}[{number}]", text)
    return list(texts)


def _check_counts(num_queries: int, num_documents: int) -> None:
    if num_queries not in (1, num_documents):
        raise RequestError(
            f"there are {num_queries} queries for {num_documents} documents; give one query for "
            "all, or one for each"
        )
