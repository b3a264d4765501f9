"""JSON files of a checkpoint, read as the work of a stranger.

Whatever is wrong with one becomes a ``ModelLoadError`` that names it: bytes that are no text, depth
that ends Python's stack, numbers that no machine has, another kind of value where an object
belongs. Files that are larger than any honest one are not read.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ostinato.errors import ModelLoadError
from ostinato.quoting import said, shown

_LARGEST_FILE = 4 * 2**20
_LARGEST_INT = 2**63 - 1
# transformers makes lists this long when it reads a config.
_COUNTS = re.compile(r"(layers?|num_labels|window_kernel_size)$")
_LARGEST_COUNT = 10_000


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
    """Refuse what overflows, is no number or counts too much, anywhere, by name."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}" if name else key, each) for key, each in value.items()]
        elif isinstance(value, list):
            # A list may say "no limit" with an infinity, as those of state-space models do.
            waiting += [(f"{name}[{n}]", v) for n, v in enumerate(value) if v != math.inf]
        elif isinstance(value, int) and abs(value) > _LARGEST_INT:
            raise ModelLoadError(f"{shown(name)} in {file} is an integer of more than 64 bits")
        elif isinstance(value, int) and value > _LARGEST_COUNT and _COUNTS.search(name):
            raise ModelLoadError(
                f"{shown(name)} in {file} is {value:,}; {_LARGEST_COUNT:,} is the most that is read"
            )
        elif isinstance(value, float) and not math.isfinite(value):
            raise ModelLoadError(f"{shown(name)} in {file} is {value}; it must be a finite number")
