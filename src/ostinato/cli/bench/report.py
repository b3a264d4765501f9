"""What the benchmarks share: their options, and how results are shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from ostinato.cli.results import write_results

PromptLen = Annotated[int, typer.Option(help="Tokens in each prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to measure over.")]
Repeats = Annotated[int, typer.Option(help="Repetitions; medians are reported.")]
Batches = Annotated[str, typer.Option(help="Batch sizes.")]
Output = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


def report(
    results: dict[str, Any],
    shown: Callable[[dict[str, Any]], list[RenderableType]],
    as_json: bool,
    output: Path | None,
) -> None:
    """Write the results where requested; show their tables, unless JSON was printed."""
    if write_results(results, as_json=as_json, output=output):
        return
    console = Console()
    machine = results["machine"]
    console.print(
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"
    )
    for part in shown(results):
        console.print(part)
