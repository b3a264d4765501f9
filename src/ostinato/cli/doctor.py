"""``ostinato doctor``: what this machine has, which fast paths are on, what would be captured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from ostinato.cli import options
from ostinato.cli.console import console
from ostinato.config import EngineConfig


@options.takes_model(only=options.OF_PLANS)
def doctor(*, config: EngineConfig, as_json: options.Json = False) -> None:
    """Show versions, fast paths, what would be captured, what would run eagerly, and why.

    Loads no model.
    """
    from ostinato.doctor import examine

    found = examine(replace(config, show_progress=False))
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    out = console()
    folded = Column(overflow="fold")  # nothing is cut off, however narrow the terminal
    environment = Table("", folded, title="Environment", show_header=False, title_justify="left")
    for name, value in found["environment"].items():
        environment.add_row(name, value)
    paths = Table("", "", "", title="Fast paths", show_header=False, title_justify="left")
    for path in found["fast_paths"]:
        paths.add_row(
            path["name"], Text("on", "green") if path["on"] else Text("off", "yellow"), path["why"]
        )
    out.print(environment, paths)
    names = found["private_names"]
    missing = names["missing"]
    out.print(
        f"Private names of torch, Triton and transformers: {names['found']} found, "
        f"{len(missing)} missing."
    )
    if missing:
        table = Table(Column("missing", overflow="fold"), "so", title_justify="left")
        for name in missing:
            table.add_row(name["path"], name["without"])
        out.print(table)
    out.print(*_graph_tables(found["graphs"]))


def _graph_tables(graphs: dict[str, Any]) -> tuple[Table, Table]:
    batches = graphs.pop("batches", ())
    folded = Column(overflow="fold")  # nothing is cut off, however narrow the terminal
    plan = Table(
        "", folded, title="What would be captured", show_header=False, title_justify="left"
    )
    for name, value in graphs.items():
        plan.add_row(
            name.replace("_", " "),
            ", ".join(map(str, value)) if isinstance(value, list) else str(value),
        )
    runs = Table("", "", "", title="How batches would run", show_header=False, title_justify="left")
    for each in batches:
        colour = "yellow" if each["eager"] else "green"
        runs.add_row(each["batch"], Text(each["runs"], colour), each["reason"])
    return plan, runs
