"""Writes results as JSON, to stdout or a file, with the command that produced them.

Files are checked before the run that fills them, which may take hours.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.errors import ConfigError

# Output paths are left out of the recorded command.
_PLACES = re.compile(r" --(output|plot|profile|report)[ =]\S+")


def check_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Raise if a file that an option names cannot be written; typer calls it before the command."""
    if path is not None:
        name, directory = f"{option.opts[0]} {path}", path.absolute().parent
        if not directory.is_dir():
            raise ConfigError(f"{name}: there is no directory {directory}; create it first")
        if path.is_dir():
            raise ConfigError(f"{name} is a directory; name a file in it")
        if not os.access(path if path.exists() else directory, os.W_OK):
            raise ConfigError(f"{name} may not be written; choose another file")
    return path


Output = Annotated[
    Path | None, typer.Option(help="Also write the JSON to this file.", callback=check_file)
]


def write_results(results: dict[str, Any], *, as_json: bool, output: Path | None) -> bool:
    """Write the results where requested, with the command that reproduces them. Returns whether
    they were printed, in place of tables. They are printed as well if the file cannot be written
    after all.
    """
    results["command"] = _PLACES.sub("", " ".join(["ostinato", *sys.argv[1:]]))
    text = json.dumps(results, indent=2) + "\n"
    problem: OSError | None = None
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            problem = error
    if as_json or problem is not None:
        sys.stdout.write(text)
    if problem is not None:
        raise ConfigError(
            f"{output} cannot be written: {problem.strerror or problem}; the results are printed"
        )
    return as_json
