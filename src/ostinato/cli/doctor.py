"""``ostinato doctor``: what this machine has, and which fast paths are on."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from ostinato.cli import options


def doctor(as_json: options.Json = False) -> None:
    """Show versions, devices and fast paths, with the reason for each one that is off."""
    from ostinato.doctor import examine

    found = examine()
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    console = Console()
    environment = Table(title="Environment", show_header=False, title_justify="left")
    for name, value in found["environment"].items():
        environment.add_row(name, value)
    paths = Table("", "", "", title="Fast paths", show_header=False, title_justify="left")
    for path in found["fast_paths"]:
        paths.add_row(path["name"], "[green]on" if path["on"] else "[yellow]off", path["why"])
    console.print(environment, paths)
    names = found["private_names"]
    missing = names["missing"]
    console.print(
        f"Private names of torch, Triton and transformers: {names['found']} found, "
        f"{len(missing)} missing."
    )
    if missing:
        table = Table("missing", "so", title_justify="left")
        for name in missing:
            table.add_row(name["path"], name["without"])
        console.print(table)
