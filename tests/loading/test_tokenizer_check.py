"""Tokenizers that would make gigabytes of a few words are refused; those that are used are not."""

from __future__ import annotations

import base64
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_talking
from tokenizers import Regex, normalizers

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ModelLoadError, RequestError

MOST_SECONDS = 2.0
MOST_BYTES = 200 * 2**20


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(kind: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def charsmap(*texts: bytes) -> str:
    """A map of SentencePiece's with an empty trie."""
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"\0".join(texts)).decode()


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
TEMPLATE = {"type": "TemplateProcessing", "single": [A] * 2000, "pair": [A, B]}
ADDED = {
    "id": 64,
    "content": "www",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}

BOMBS: dict[str, dict[str, Any]] = {
    "doubled": {"normalizer": sequence("normalizers", [replace("w", "ww")] * 40)},
    "doubled without a type": {
        "normalizer": {"normalizers": [{"pattern": {"String": "w"}, "content": "ww"}] * 40}
    },
    "sequences of sequences": {
        "normalizer": sequence(
            "normalizers", [sequence("normalizers", [replace("w", "www")] * 5)] * 5
        )
    },
    "one long content": {"normalizer": replace("w", "w" * 10**6)},
    "by a pattern of nothing": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "w" * 1000}
    },
    "prepended": {
        "normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "w" * 10**6}])
    },
    "prepended, then doubled": {
        "normalizer": sequence(
            "normalizers", [{"type": "Prepend", "prepend": "w"}, replace("w", "ww")] * 20
        )
    },
    "bytes of bytes": {"normalizer": sequence("normalizers", [{"type": "ByteLevel"}] * 40)},
    "bytes of bytes of words": {"pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 40)},
    "a map": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"w" * 10**6)}
    },
    "an added token": {
        "normalizer": sequence("normalizers", [replace("w", "ww")] * 40),
        "added_tokens": [ADDED],
    },
    "both kinds of steps": {
        "normalizer": sequence("normalizers", [replace("w", "é" * 16)] * 2),
        "pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 8),
    },
    "decoder": {"decoder": sequence("decoders", [replace("w", "ww")] * 40)},
    "decoder between characters": {
        "decoder": sequence("decoders", [{"type": "BPEDecoder", "suffix": ""}] * 40)
    },
    "decoder, delimiters": {
        "decoder": sequence(
            "decoders",
            [{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}] * 40,
        )
    },
    "text repeated": {"post_processor": TEMPLATE | {"special_tokens": {}}},
    "steps without end": {"normalizer": sequence("normalizers", [replace("w", "v")] * 10**5)},
}


def save(path: Path, fields: dict[str, Any], *, hidden: bool = False) -> Path:
    save_talking(path, None)
    file = path / "tokenizer.json"
    text = json.dumps(json.loads(file.read_text()) | fields)
    if hidden:
        text = text.replace('"normalizer"', '"normali\\u007aer"').replace('"dec', '"\\u0064ec')
    file.write_text(text)
    return path


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", show_progress=False, graphs=GraphConfig(mode="NONE"))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.sweep
@pytest.mark.parametrize("hidden", [False, True], ids=["", "hidden"])
@pytest.mark.parametrize("fields", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused(tmp_path: Path, fields: dict[str, Any], hidden: bool) -> None:
    save(tmp_path, fields, hidden=hidden)
    before, start = peak(), time.process_time()
    with pytest.raises(ModelLoadError, match=r"the tokenizer in .*tokenizer\.json (may|has)"):
        opened(tmp_path)
    assert time.process_time() - start < MOST_SECONDS
    assert peak() - before < MOST_BYTES


def test_a_file_of_another_version_is_checked_too(tmp_path: Path) -> None:
    save(tmp_path, BOMBS["doubled"])
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.4.0.0.json")
    save(tmp_path, {})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.4\.0\.0\.json may make a text"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": sequence("normalizers", [replace("w", "ww")] * 9)},
        {"pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 9)},
        {"post_processor": TEMPLATE | {"special_tokens": {}, "single": [A] * 512}},
    ],
    ids=["normalizer", "pre-tokenizer", "post-processor"],
)
def test_long_texts_are_tried_in_part(tmp_path: Path, fields: dict[str, Any]) -> None:
    """What is within the limit of a file makes little of a word, and too much of a book."""
    save(tmp_path, fields)
    with opened(tmp_path) as llm:
        before, start = peak(), time.process_time()
        with pytest.raises(RequestError, match=r"500 characters of the prompt into .* than 32 "):
            llm.generate("wé " * 15_000)
        assert time.process_time() - start < MOST_SECONDS
        assert peak() - before < MOST_BYTES


def test_padding_of_a_file_is_not_applied(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "w0"}
    with opened(save(tmp_path, {"padding": padding})) as llm:
        (output,) = llm.generate("w1 w2", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [1, 2]


SPACE = "\u2581"
HONEST: dict[str, dict[str, Any]] = {
    "none": {"normalizer": None, "decoder": None},
    "llama 2": {
        "normalizer": sequence(
            "normalizers", [{"type": "Prepend", "prepend": SPACE}, replace(" ", SPACE)]
        ),
        "decoder": sequence(
            "decoders",
            [
                replace(SPACE, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        ),
    },
    "gpt": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "post_processor": BYTE_LEVEL,
    },
    "xlnet": {
        "normalizer": sequence(
            "normalizers",
            [
                replace("``", '"'),
                replace("''", '"'),
                {"type": "NFKD"},
                {"type": "StripAccents"},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ],
        ),
        "pre_tokenizer": sequence(
            "pretokenizers",
            [
                {"type": "WhitespaceSplit"},
                {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"},
            ],
        ),
        "post_processor": TEMPLATE | {"single": [A], "special_tokens": {}},
    },
}


@pytest.mark.parametrize("fields", HONEST.values(), ids=HONEST.keys())
def test_steps_of_honest_tokenizers_are_taken(tmp_path: Path, fields: dict[str, Any]) -> None:
    with opened(save(tmp_path, fields)) as llm:
        (output,) = llm.generate("w1", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == llm.tokenizer.encode("w1")


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel"])
def test_expansions_of_steps_are_bounds(form: str) -> None:
    """Over all of Unicode: the numbers by which files are judged."""
    from ostinato.loading.tokenizer_check import EXPANSION

    step = getattr(normalizers, form)()
    for first in range(0, 0x110000, 97):
        if not 0xD800 <= first < 0xE000:
            text = chr(first)
            assert len(step.normalize_str(text).encode()) <= EXPANSION[form] * len(text.encode())
    worst = "\ufdfa\u0390\u0130\u1e9e\u1f82\ufb2c"
    for text in worst:
        assert len(step.normalize_str(text).encode()) <= EXPANSION[form] * len(text.encode())


def test_the_expansion_of_a_pattern_is_a_bound() -> None:
    text = "w" * 100
    assert len(normalizers.Replace(Regex(""), "ab").normalize_str(text)) <= (1 + 2) * len(text) + 2
