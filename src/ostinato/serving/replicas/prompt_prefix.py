"""``PromptPrefix``: the part of a request that tells which replica has its prefix cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

_BLOCK = 256  # characters
_MOST_BLOCKS = 64
# The fields that prompts begin with, in this order, by route. Keys and values of adapters differ.
_FIELDS = {
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "tools", "chat_template_kwargs", "messages"),
    "/v1/responses": ("model", "instructions", "input"),
}


@dataclass(frozen=True)
class PromptPrefix:
    """``keys``: one for each block of text, which stands for all up to its end. ``size``: the
    length of the text in characters."""

    keys: tuple[bytes, ...] = ()
    size: int = 0

    @classmethod
    def of(cls, path: str, body: bytes) -> PromptPrefix:
        """The prefix of a request; empty if it has none. A body that is wrong is the replica's to
        refuse."""
        if path not in _FIELDS:
            return cls()
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(fields, dict):
            return cls()
        text = "\0".join(_text(fields.get(name)) for name in _FIELDS[path])
        keys: list[bytes] = []
        last = b""
        for start in range(0, min(len(text), _BLOCK * _MOST_BLOCKS) - _BLOCK + 1, _BLOCK):
            block = text[start : start + _BLOCK].encode("utf-8", "surrogatepass")
            last = hashlib.blake2b(block, key=last, digest_size=16).digest()
            keys.append(last)
        return cls(tuple(keys), len(text))

    @property
    def block_size(self) -> int:
        return _BLOCK


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, separators=(",", ":"))
