"""``Detokenizer.read``: what is new in a list that grows, with stop strings and ``min_tokens``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import SamplingParams
from ostinato.text.detokenizer import Detokenizer


class Letters:
    """A tokenizer with a token for each letter."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(chr(token) for token in token_ids)


def reading(stop: list[str], **params: Any) -> Detokenizer:
    return Detokenizer(Letters(), SamplingParams(stop=stop, **params))


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("min_tokens", "found", "text"),
    [
        (0, "ab", "x"),
        (2, "ab", "x"),
        (3, "ab", "x"),  # the third token completes it, which is enough
        (4, "ab", "xab"),
        (5, "ab", "xab"),
        (6, None, "xabab"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_counts_from_the_token_that_completes_it(
    min_tokens: int, found: str | None, text: str, at_once: bool
) -> None:
    detokenizer, ids = reading(["ab"]), tokens("xababy")[:5]
    results = []
    for count in [5] if at_once else range(1, 6):
        results.append(detokenizer.read(ids[:count], min_tokens))
        if results[-1] is not None:
            break
    assert results[-1] == found
    if found is None:
        detokenizer.finish()
    assert detokenizer.text == text


def test_a_list_that_did_not_grow_brings_nothing() -> None:
    detokenizer, ids = reading([]), tokens("abc")
    for _ in range(3):
        assert detokenizer.read(ids) is None
        assert detokenizer.text == "abc"
    ids += tokens("de")
    detokenizer.read(ids)
    assert detokenizer.text == "abcde"


@given(
    text=st.text("ab", max_size=12),
    stop=st.text("ab", min_size=1, max_size=3),
    min_tokens=st.integers(0, 14),
    cuts=st.sets(st.integers(0, 12)),
    include=st.booleans(),
)
def test_where_the_list_is_read_does_not_matter(
    text: str, stop: str, min_tokens: int, cuts: set[int], include: bool
) -> None:
    detokenizer = reading([stop], include_stop_str_in_output=include)
    found = None
    for count in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        found = found or detokenizer.read(tokens(text[:count]), min_tokens)
        if found:
            break
    ends = [
        end for end in range(1, len(text) + 1) if text[:end].endswith(stop) and end >= min_tokens
    ]
    assert found == (stop if ends else None)
    if not ends:
        detokenizer.finish()
        assert detokenizer.text == text
        return
    end = ends[0]
    assert detokenizer.text == text[: end if include else end - len(stop)]
