"""The ``ostinato`` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="CUDA graphs for LLM inference.")
bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(bench, name="bench")


@app.callback()
def main() -> None:
    """CUDA graphs for LLM inference."""


@app.command()
def version() -> None:
    """Print the version."""
    from ostinato import __version__

    Console().print(__version__)


@bench.command()
def core(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Cost of dispatch and wrapper; replay against eager; graphed() against torch's own ways."""
    from ostinato.bench.core import run

    results = run()
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    else:
        _show(results)


def _show(results: dict[str, Any]) -> None:
    console = Console()
    machine = results["machine"]
    console.print(
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"
    )
    console.print(_core_table(results))
    if "stream" in results:
        console.print(_stream_table(results["stream"]))


def _core_table(results: dict[str, Any]) -> Table:
    table = Table(title="The graph machinery")
    for column in ("what", "measured", "target"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for keys, microseconds in results["dispatch_us"].items():
        table.add_row(f"dispatch of a batch, {keys} graphs", f"{microseconds:.2f} µs", "≤ 1 µs")
    for device, cost in results["wrapper_us"].items():
        what = f"wrapper over bare replay, 10 tensors, {device}"
        table.add_row(what, f"{cost['own_cost']:.2f} µs", "≤ 3 µs")
    for step in results["cpu_decoder"]:
        what = f"30-layer decoder on the CPU, batch {step['batch']}: replay / eager"
        measured = f"{step['replay_ms']:.1f} / {step['eager_ms']:.1f} ms = {step['ratio']:.2f}"
        table.add_row(what, measured, "< 1")
    return table


def _stream_table(stream: list[dict[str, Any]]) -> Table:
    table = Table(title="1,000 random batches of 1 to 64 through a 6-layer transformer, bf16")
    for column in ("", "total", "first 1,000, warm-up included", "peak memory"):
        table.add_column(column, justify="left" if not column else "right")
    for row in stream:
        table.add_row(
            row["name"],
            f"{row['total_s'] * 1e3:.0f} ms",
            f"{row['first_1000_s']:.2f} s",
            f"{row['peak_mib']:.0f} MiB",
        )
    return table


if __name__ == "__main__":
    app()
