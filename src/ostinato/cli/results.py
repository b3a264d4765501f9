"""Results as JSON: to the screen, to a file, with the command that made them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

# Where files went is nobody's business.
_PLACES = re.compile(r" --(output|plot|profile)[ =]\S+")


def write_results(results: dict[str, Any], *, as_json: bool, output: Path | None) -> bool:
    """Write them where they were asked for, with the command as it was given, so that a file says
    how to make it again. Whether they went to the screen, in place of tables.
    """
    results["command"] = _PLACES.sub("", " ".join(["ostinato", *sys.argv[1:]]))
    text = json.dumps(results, indent=2) + "\n"
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    return as_json
