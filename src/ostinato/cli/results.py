"""Writes results as JSON, to stdout or a file, with the command that produced them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

# Output paths are left out of the recorded command.
_PLACES = re.compile(r" --(output|plot|profile|report)[ =]\S+")


def write_results(results: dict[str, Any], *, as_json: bool, output: Path | None) -> bool:
    """Write the results where requested, with the command that reproduces them. Returns whether
    they were printed, in place of tables.
    """
    results["command"] = _PLACES.sub("", " ".join(["ostinato", *sys.argv[1:]]))
    text = json.dumps(results, indent=2) + "\n"
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    return as_json
