"""Writes results as JSON, to stdout or a file, with the command that produced them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.paths import check_writable, writing

# Output paths are left out of the recorded command.
_PLACES = re.compile(r" --(output|plot|profile|report)[ =]\S+")


def output_file(*flags: str, help_text: str) -> Any:
    """An option that names a file to write, refused before the command works for it."""
    return typer.Option(*flags, help=help_text, callback=_writable)


def _writable(path: Path | None) -> Path | None:
    if path is not None:
        check_writable(path)
    return path


Output = Annotated[
    Path | None, output_file("--output", help_text="Also write the JSON to this file.")
]


def write_results(
    results: dict[str, Any], *, as_json: bool, output: Path | None, show: Callable[[], None]
) -> None:
    """Print the results, as JSON or with ``show``, and write them where requested, with the command
    that reproduces them.
    """
    results["command"] = _PLACES.sub("", " ".join(["ostinato", *sys.argv[1:]]))
    text = json.dumps(results, indent=2) + "\n"
    try:
        if output is not None:
            with writing(output):
                output.write_text(text, encoding="utf-8")
    finally:  # a full disk does not lose what was measured
        if as_json:
            sys.stdout.write(text)
        else:
            show()
