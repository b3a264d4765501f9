"""``ostinato plan``: predictions, with all their assumptions. Runs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ostinato.cli import options
from ostinato.cli.layouts import Layouts, parse_layouts
from ostinato.cli.results import write_results
from ostinato.cli.tables import parallel_tables
from ostinato.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Predict costs, and state the assumptions.")


@app.callback()
def main() -> None:
    """Predict costs, and state the assumptions."""


@app.command()
def parallel(
    *,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Output of `bench parallel --output`. Default: a roofline."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model shape. Default: llama-3.1-8b.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of GPUs. Default: all of 2 to 8 that fit.")
    ] = None,
    layouts: Layouts = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s per GPU in one direction. Default: 450, NVLink 4.")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="µs per collective. Default: 10.")] = None,
    memory_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of a GPU's memory. Default: 4390, an H200.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option(help="TFLOP/s of a GPU. Default: an H200's for the dtype.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Keys that a decoded token attends to. Default: 512.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Largest batch. Default: 2048, or the largest measured.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot step times: .png, .svg or .pdf. Needs matplotlib.")
    ] = None,
    plot_layout: Annotated[
        str | None, typer.Option(help="Layout to plot. Default: most GPUs, then most SP.")
    ] = None,
    as_json: options.Json = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Predict step times, thresholds and the best layout of TP, SP and shift on several GPUs."""
    from ostinato.bench.layouts import plot as plot_parallel
    from ostinato.planner.forecast import Question, run

    drawn = parse_layouts(plot_layout, "--plot-layout")
    if plot is not None:
        plot_parallel.check_picture(plot)
    elif drawn:
        raise ConfigError("--plot-layout needs --plot, which says where to write the plot")
    results = run(
        Question(
            source=source,
            model=model,
            dtype=dtype,
            gpus=options.integers(gpus, "--gpus"),
            layouts=parse_layouts(layouts, "--layouts"),
            bandwidth=bandwidth,
            latency=latency,
            memory_bandwidth=memory_bandwidth,
            peak=peak,
            context=context,
            max_tokens=max_tokens,
        )
    )
    if plot is not None:
        plot_parallel.draw_into(results, plot, drawn[0] if drawn else None)
    if write_results(results, as_json=as_json, output=output):
        return
    console = Console()
    for part in parallel_tables.plan_tables(results):
        console.print(part)
