"""What the benchmarks share: their options, and how results are shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ostinato.cli.console import console
from ostinato.cli.results import Output as Output
from ostinato.cli.results import write_results

PromptLen = Annotated[int, typer.Option(help="Tokens in each prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to measure over.")]
Repeats = Annotated[int, typer.Option(help="Repetitions; medians are reported.")]
Batches = Annotated[str, typer.Option(help="Batch sizes.")]


def report(
    results: dict[str, Any],
    shown: Callable[[dict[str, Any]], list[RenderableType]],
    as_json: bool,
    output: Path | None,
) -> None:
    """Write the results where requested; show their tables, unless JSON was printed."""

    def show() -> None:
        out, machine = console(), results["machine"]
        name = machine["gpu"] or machine["cpu"]
        out.print(f"{name}, torch {machine['torch']}, {machine['date']}")
        for part in shown(results):
            out.print(part)

    write_results(results, as_json=as_json, output=output, show=show)
