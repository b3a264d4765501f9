"""Benchmarks without an engine: the library, the sampler, one rank of several; and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli import options
from ostinato.cli.bench.report import Batches, Output, Repeats, report
from ostinato.cli.layouts import Layouts, parse_layouts
from ostinato.cli.tables import bench_tables as tables
from ostinato.cli.tables import parallel_tables
from ostinato.config import EngineConfig


def core(as_json: options.Json = False, output: Output = None) -> None:
    """Cost of dispatch and wrapper; replay vs. eager; graphed() vs. torch's alternatives."""
    from ostinato.bench.core.run import run

    report(run(), tables.core_tables, as_json, output)


def sampling(
    *,
    batch: Batches = "1,8,64",
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 151_936,
    history: Annotated[int, typer.Option(help="Tokens of each sequence so far.")] = 2048,
    repeats: Repeats = 20,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Time of the full sampler (filters, penalties, log-probabilities) against plain torch."""
    from ostinato.bench.sampling import run

    results = run(
        batches=options.integers(batch, "--batch") or [],
        vocab_size=vocab_size,
        history=history,
        repeats=repeats,
        device=EngineConfig(device=device).torch_device(),
    )
    report(results, tables.sampling_tables, as_json, output)


def parallel(
    *,
    model: Annotated[str, typer.Option(help="Model shape; weights are random.")] = "llama-3.2-1b",
    layouts: Layouts = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens. Default: 1,2,4,...,2048.")] = None,
    context: Annotated[int, typer.Option(help="Keys that a decoded token attends to.")] = 512,
    repeats: Repeats = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """One rank's compute time per step of a multi-rank model; communication excluded."""
    from ostinato.bench.layouts.run import TOKENS, run

    results = run(
        model,
        layouts=parse_layouts(layouts, "--layouts"),
        tokens=options.integers(tokens, "--tokens") or TOKENS,
        context=context,
        repeats=repeats,
        device=device,
        dtype=dtype,
    )
    report(results, parallel_tables.bench_tables, as_json, output)


def plot(
    result: Annotated[
        Path, typer.Argument(help="Output of `bench decode`, `throughput` or `serve`.")
    ],
    out: Annotated[Path, typer.Option(help="The plot: .png, .svg or .pdf.")],
) -> None:
    """Plot the time per output token over the batch size, or tokens/s, with matplotlib."""
    from ostinato.bench.plot import draw_file

    draw_file(result, out)
