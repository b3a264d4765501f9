"""Reads JSON files of a checkpoint as untrusted input.

Any defect raises a ``ModelLoadError`` that names the file: invalid text, nesting beyond Python's
stack, numbers that overflow, another kind of value instead of an object. Files larger than any
legitimate one are not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostinato.errors import ModelLoadError
from ostinato.quoting import said, shown

_LARGEST_FILE = 4 * 2**20
_LARGEST_INT = 2**63 - 1
# transformers builds lists of this length when it reads a config.
_COUNTS = re.compile(
    r"(layers?|blocks|num_labels|window_kernel_size|first_k_dense_replace)(\[\d+\])?$"
)
_LARGEST_COUNT = 10_000
_LONGEST_NAME = 80
_LONGEST_TEXT = 65_536


def read_object(file: Path, *, largest: int = _LARGEST_FILE) -> dict[str, Any]:
    """The JSON object that ``file`` holds."""
    try:
        size = file.stat().st_size
        if size > largest:
            raise ModelLoadError(
                f"{file} has {size:,} bytes; such a file has {largest:,} at most: fetch it again"
            )
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as JSON ({said(error)}); it is damaged: fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(
            f"{file} is not a JSON object: it holds {shown(content)}; fetch it again"
        )
    return content


def check_numbers(file: Path, content: dict[str, Any]) -> None:
    """Raise for values anywhere that overflow, are not finite or are too large, and name them."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        for name, value in _named(*waiting.pop()):
            if isinstance(value, dict | list):
                waiting.append((name, value))
            else:
                _check_number(file, name, value)
            if name.endswith("attention_types") and isinstance(value, list):
                _check_count(file, name, sum(map(_num_repeated, value)))


def _named(outer: str, container: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """The items of ``container`` by the ends of their names, which can be megabytes long."""
    if isinstance(container, dict):
        for key, value in container.items():
            yield (f"{outer}.{key}" if outer else key)[-_LONGEST_NAME:], value
        return
    for number, value in enumerate(container):
        # A list may use infinity for "no limit", as in state-space models.
        if value != math.inf:
            yield f"{outer}[{number}]"[-_LONGEST_NAME:], value


def _check_number(file: Path, name: str, value: object) -> None:
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ModelLoadError(f"{shown(name)} in {file} is an integer of more than 64 bits")
    if isinstance(value, int) and _COUNTS.search(name):
        _check_count(file, name, value)
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:  # some have a letter for each layer
        raise ModelLoadError(
            f"{shown(name)} in {file} has {len(value):,} characters; the limit is {_LONGEST_TEXT:,}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelLoadError(f"{shown(name)} in {file} is {value}; it must be a finite number")


def _check_count(file: Path, name: str, count: int) -> None:
    if count > _LARGEST_COUNT:
        raise ModelLoadError(
            f"{shown(name)} in {file} is {count:,}; the limit is {_LARGEST_COUNT:,}"
        )


def _num_repeated(entry: object) -> int:
    """The number of layers in one of GPT-Neo's ``attention_types``: some kinds, repeated."""
    match entry:
        case [list() | str() as kinds, int(times)]:
            return len(kinds) * max(0, times)
    return 0
