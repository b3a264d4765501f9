"""``ostinato plan``: predictions, with all their assumptions, and the best capture sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ostinato.cli import options
from ostinato.cli.console import console
from ostinato.cli.layouts import Layouts, parse_layouts
from ostinato.cli.results import Output, output_file, write_results
from ostinato.cli.tables import parallel_tables
from ostinato.config import EngineConfig
from ostinato.config.memory_size import parse_bytes
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.planner.graphs.step_costs import StepCosts

app = typer.Typer(no_args_is_help=True, help="Predict costs, and choose what to capture.")


@app.callback()
def main() -> None:
    """Predict costs, and choose what to capture."""


@app.command()
@options.takes_model(without=("graph_memory",))
def graphs(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="Requests, one a line: arrival_s, prompt_tokens, ...")
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="LLM.step_shapes() of a running engine, as JSON.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs of steps. Default: measure the model.")
    ] = None,
    save_costs: Annotated[
        Path | None, output_file("--save-costs", help_text="Write the measured costs here.")
    ] = None,
    max_graphs: Annotated[int | None, typer.Option(help="Most graphs, of both kinds.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Most time to capture them.")] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Most memory for them, pool included: '512M'.")
    ] = None,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Choose the sizes to capture: the fastest for observed requests within limits."""
    from ostinato.graphs.policy.choose_sizes import GraphLimits
    from ostinato.planner.graphs.observed import read_shapes, shapes_of_trace
    from ostinato.planner.graphs.plan import plan_graphs
    from ostinato.planner.graphs.step_costs import StepCosts
    from ostinato.planner.graphs.trace import read_trace

    if (trace is None) == (stats is None):
        raise ConfigError("give the observed requests as --trace or as --stats, exactly one")
    limits = GraphLimits(
        max_graphs=max_graphs,
        max_seconds=max_seconds,
        max_bytes=None if max_memory is None else parse_bytes(max_memory),
    )
    requests = None if trace is None else read_trace(trace)
    known = None if stats is None else read_shapes(stats)
    if costs is None:
        measured = _measured(config)
        if save_costs is not None:
            measured.write(save_costs)
    elif save_costs is not None:
        raise ConfigError("--save-costs writes what is measured, but --costs was given; omit one")
    else:
        measured = StepCosts.read(costs)
    shapes = shapes_of_trace(requests, measured) if requests is not None else known
    assert shapes is not None, "one of the two was given"
    results = plan_graphs(shapes, measured, limits)
    write_results(results, as_json=as_json, output=output, show=lambda: _show_plan(results))


def _show_plan(results: dict[str, Any]) -> None:
    from ostinato.planner.graphs.plan import as_flags

    table = Table("", "planned", "default", title=f"{results['steps']:,} steps")
    planned, default = results["planned"], results["default"]
    for name in ("graphs", "bytes", "capture_seconds", "ms_per_step"):
        table.add_row(name.replace("_", " "), f"{planned[name]:,.4g}", f"{default[name]:,.4g}")
    out = console()
    out.print(table)
    gain = results["gain"]
    compared = f"{abs(gain):.2%} {'more' if gain < 0 else 'less'} time per step"
    out.print(f"{compared} than with the default sizes")
    for flag in as_flags(planned["sizes"]):
        out.print(flag, soft_wrap=True)


def _measured(config: EngineConfig) -> StepCosts:
    from ostinato.llm import LLM
    from ostinato.planner.graphs.step_costs import check_measurable, measure

    check_measurable(config)  # before a model is loaded
    with LLM.from_config(replace(config, show_progress=False)) as llm:
        return measure(llm)


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
    output: Output = None,
) -> None:
    """Predict step times, thresholds and the best layout of TP, SP and shift on several GPUs."""
    from ostinato.bench.layouts.plot import draw_into
    from ostinato.bench.plot import check_plot_file
    from ostinato.planner.forecast import Question, run

    drawn = parse_layouts(plot_layout, "--plot-layout")
    if plot is not None:
        check_plot_file(plot)
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
        draw_into(results, plot, drawn[0] if drawn else None)

    def show() -> None:
        out = console()
        for part in parallel_tables.plan_tables(results):
            out.print(part)

    write_results(results, as_json=as_json, output=output, show=show)
