"""Amounts of memory as users write them."""

from __future__ import annotations

import re

from ostinato.errors import ConfigError
from ostinato.quoting import shown

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: int | str) -> int:
    """Parse a number of bytes: 1073741824, "1GiB", "512M"."""
    if type(value) is int and value > 0:
        return value
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?)(i?b)?", str(value).strip().lower())
    try:
        count = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise ConfigError(
            f"not an amount of memory: {shown(value)}; write 1073741824, '1GiB' or '512M'"
        )
    return count
