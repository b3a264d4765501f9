"""Bounds how far a tokenizer can expand a text, from its tokenizer.json, before it is loaded.

Its steps are small programs: each ``Replace`` may double a text, and forty of them turn a word into
gigabytes, even an added token while the file is loaded. Only the parts with steps are located in
the file and parsed, because a vocabulary of megabytes would take most of the time.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostinato.errors import ModelLoadError
from ostinato.quoting import said

# In bytes, over all steps, at most. Honest ones stay below 500, by the generous bounds below: an
# XLNet's. A text of 20 characters takes 20 KB then, and longer ones are tried in part first.
LARGEST_EXPANSION = 1000
_MOST_STEPS = 100  # each is a pass over every text; honest tokenizers have ten
_LARGEST_FILE = 256 * 2**20  # those of large vocabularies have 40 MB
_LARGEST_TEMPLATE = 4 * 2**20  # of a conversation; the longest have some 30 KB
_ENCODING = ("normalizer", "pre_tokenizer", "post_processor")
_DECODING = ("decoder",)
# A letter of a name (or an underscore) as an escape, which only serves to hide the name.
_HIDDEN = re.compile(r"\\u00(?:[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")
_AFTER_KEY = re.compile(r"\s*:\s*")

# The most bytes a step may make of one byte, for steps whose settings do not matter.
EXPANSION = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,  # U+FDFA is a whole phrase
    "NFKD": 11,
    "Lowercase": 2,
    "BertNormalizer": 8,  # decomposes, lower-cases, and puts spaces around ideographs
    "ByteLevel": 2,  # every byte becomes a character
    "Metaspace": 4,  # a space, or nothing, becomes one that can be seen
    "WordPiece": 2,
    "CTC": 2,  # an empty delimiter stands between all characters
    "BPEDecoder": 2,
}
_UNNAMED = 8  # the largest of them
_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")


def check_tokenizer(path: Path) -> None:
    """Raise if the tokenizer in the directory ``path`` could expand texts too far."""
    for file in sorted([*path.glob("*.jinja"), *path.glob("*/*.jinja")]):  # chat templates
        if file.is_file():
            _check_size(file, _LARGEST_TEMPLATE)
    for file in sorted(path.glob("tokenizer.*json")):  # some are of one version of transformers
        if not file.is_file():
            continue
        try:
            _check_file(file)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as err:
            raise ModelLoadError(
                f"transformers cannot read the tokenizer in {path}: {file.name} is damaged "
                f"({said(err)}); fetch it again"
            ) from err


def _check_size(file: Path, largest: int) -> None:
    size = file.stat().st_size
    if size > largest:
        raise ModelLoadError(
            f"{file} has {size:,} bytes, above the limit of {largest:,} for such a file; fetch it "
            "again"
        )


def _check_file(file: Path) -> None:
    _check_size(file, _LARGEST_FILE)
    text = file.read_text(encoding="utf-8")
    hidden = _HIDDEN.search(text) is not None
    for names in (_ENCODING, _DECODING):
        _check_steps(file, names, [list(_parts(text, name, hidden)) for name in names])


def _check_steps(file: Path, names: tuple[str, ...], parts: list[list[Any]]) -> None:
    num_steps = sum(_num_steps(part) for those in parts for part in those)
    if num_steps > _MOST_STEPS:
        raise ModelLoadError(
            f"the tokenizer in {file} has {num_steps:,} steps in its {', '.join(names)}, above the "
            f"limit of {_MOST_STEPS}; remove those that are not needed"
        )
    expansion = math.prod(max(map(_expansion, those), default=1.0) for those in parts)
    if expansion > LARGEST_EXPANSION:
        raise ModelLoadError(
            f"the tokenizer in {file} may make a text {expansion:.3g} times as long, in the steps "
            f"of its {', '.join(names)}, and the limit is {LARGEST_EXPANSION:,}; remove steps that "
            "are not needed, such as Replace with a long content"
        )


def _parts(text: str, name: str, hidden: bool) -> Iterator[Any]:
    """Every object called ``name``; only a malicious file has more than one."""
    if hidden:
        whole = json.loads(text)
        yield whole.get(name) if isinstance(whole, dict) else None
        return
    decoder, key = json.JSONDecoder(), json.dumps(name)
    position = text.find(key)
    while position >= 0:
        end = position + len(key)
        colon = _AFTER_KEY.match(text, end)
        if colon is not None and text.startswith("{", colon.end()):
            part, end = decoder.raw_decode(text, colon.end())
            yield part
        position = text.find(key, end)


def _steps(step: Any) -> list[Any]:
    """The steps of a sequence. Fields tell what a step is, since its type may be left out."""
    if not isinstance(step, dict):
        return []
    return [each for name in _SEQUENCES if isinstance(step.get(name), list) for each in step[name]]


def _num_steps(step: Any) -> int:
    return 1 + sum(map(_num_steps, _steps(step)))


def _expansion(step: Any) -> float:
    """An upper bound on the bytes that ``step``, with the steps inside it, makes of one byte."""
    if not isinstance(step, dict):
        return 1.0
    if steps := _steps(step):
        return math.prod(map(_expansion, steps), start=1.0)
    if "pattern" in step and "content" in step:
        return _of_replace(step["pattern"], _num_bytes(step["content"]))
    if "prepend" in step:
        return 1.0 + _num_bytes(step["prepend"])
    if "precompiled_charsmap" in step:
        return _of_map(step["precompiled_charsmap"])
    if "single" in step:  # where the text goes, and special tokens around it
        return max(1.0, sum("Sequence" in piece for piece in step["single"]))
    return EXPANSION.get(str(step["type"]), 1.0) if "type" in step else _UNNAMED


def _of_replace(pattern: dict[str, str], content: int) -> float:
    found = pattern.get("String")
    if found:
        return max(1.0, content / _num_bytes(found))
    return 1.0 + content  # what matches nothing at all does so between any two characters


def _of_map(encoded: str | None) -> float:
    """Of SentencePiece's map: a trie, after its size, and what its entries stand for."""
    if not encoded:
        return 1.0
    data = base64.b64decode(encoded)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1.0, *map(len, texts.split(b"\0")))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
