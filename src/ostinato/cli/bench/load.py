"""Benchmarks of many requests at once: to an engine, and to a server."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from ostinato.cli import options
from ostinato.cli.bench.report import Output, report
from ostinato.cli.extras import needs_extra
from ostinato.cli.report import RunFile, write_run_file
from ostinato.cli.tables import bench_tables as tables
from ostinato.cli.tables.serve_tables import serve_tables
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError


@options.takes_model()
def throughput(
    *,
    mix: Annotated[
        str,
        typer.Option(
            help="Any of chat, long-in-short-out, short-in-long-out, shared-prefix, prompts."
        ),
    ] = "chat",
    num_requests: Annotated[
        int | None, typer.Option(help="Requests of each mix. Default: the mix's own number.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiply all lengths by this.")] = 1.0,
    arrival: Annotated[str, typer.Option(help="all (at once) or poisson.")] = "all",
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, for --arrival poisson.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs; the median one is reported.")] = 3,
    run_file: RunFile = None,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Tokens per second and latency of many requests of different lengths."""
    from ostinato.bench.throughput import run

    results = run(
        replace(config, show_progress=False),
        mixes=[name for name in mix.split(",") if name],
        num_requests=num_requests,
        scale=scale,
        arrival=arrival,
        rate=rate,
        seed=seed,
        repeats=repeats,
        show_progress=not quiet,
        observe=lambda llm: write_run_file(llm, run_file),
    )
    report(results, tables.throughput_tables, as_json, output)


@options.takes_model()
def serve(
    *,
    mix: Annotated[
        str,
        typer.Option(help="chat, long-in-short-out, short-in-long-out, shared-prefix or prompts."),
    ] = "chat",
    num_requests: Annotated[int, typer.Option(help="Requests to send.")] = 64,
    scale: Annotated[float, typer.Option(help="Multiply all lengths by this.")] = 1.0,
    rate: Annotated[
        float, typer.Option(help="Requests per second, at random times; inf: all at once.")
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    max_seconds: Annotated[float, typer.Option(help="Longest time of a run.")] = 300.0,
    ttft_limit: Annotated[
        float | None, typer.Option(help="Milliseconds to a first token, for goodput.")
    ] = None,
    tpot_limit: Annotated[
        float | None, typer.Option(help="Milliseconds per token after it, for goodput.")
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="Any of transformers, transformers-cb; empty for none.")
    ] = "",
    in_process: Annotated[
        bool, typer.Option(help="Through AsyncLLM, without HTTP; and against LLM.generate.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(help="Runs of --in-process; the median one is reported.")
    ] = 3,
    url: Annotated[
        str | None,
        typer.Option(help="A server that runs already. Its key: OSTINATO_API_KEY."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option(help="The server of --url may be on another machine.")
    ] = False,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Latency, throughput and goodput of a server, with requests at random times."""
    from ostinato.bench.serving.answer import Limits
    from ostinato.bench.serving.run import Load, run_against, run_in_process, run_over_http

    load = Load(
        mix=mix,
        num_requests=num_requests,
        scale=scale,
        rate=rate,
        seed=seed,
        max_seconds=max_seconds,
        limits=Limits(ttft_ms=ttft_limit, tpot_ms=tpot_limit),
    )
    config = replace(config, show_progress=False)
    if sum((in_process, url is not None, bool(baselines))) > 1:
        raise ConfigError("give one of --in-process, --url and --baselines")
    if in_process:
        results = run_in_process(config, load, repeats=repeats, show_progress=not quiet)
    else:
        with needs_extra("bench serve", "bench"):
            if url is not None:
                key = os.environ.get("OSTINATO_API_KEY") or None
                results = run_against(
                    url, load, api_key=key, allow_remote=allow_remote, show_progress=not quiet
                )
            else:
                names = [name for name in baselines.split(",") if name]
                results = run_over_http(config, load, baselines=names, show_progress=not quiet)
    report(results, serve_tables, as_json, output)
