"""``ostinato bench``: measurements, as tables or JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from ostinato.cli import options, parallel_tables, tables
from ostinato.cli.extras import needs_extra
from ostinato.cli.layouts import Layouts, parse_layouts
from ostinato.cli.results import write_results
from ostinato.cli.serve_tables import serve_tables
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, MeasurementError
from ostinato.offload.offload_config import OffloadConfig

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


_MODES = "FULL_DECODE_ONLY,PIECEWISE,FULL_AND_PIECEWISE,FULL,FULL_AND_FULL"
PromptLen = Annotated[int, typer.Option(help="Tokens in each prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to measure over.")]
Repeats = Annotated[int, typer.Option(help="Repetitions; medians are reported.")]
Batches = Annotated[str, typer.Option(help="Batch sizes.")]
Output = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


@app.command()
def core(as_json: options.Json = False, output: Output = None) -> None:
    """Cost of dispatch and wrapper; replay vs. eager; graphed() vs. torch's alternatives."""
    from ostinato.bench.core import run

    _report(run(), tables.core_tables, as_json, output)


@app.command()
@options.takes_model()
def decode(
    *,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes. Default: 1,2,4,...,256 on CUDA, else 1,8.")
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="Any of eager, hf, hf-compile; empty for none.")
    ] = "eager,hf",
    prompt_len: PromptLen = 128,
    new_tokens: NewTokens = 128,
    repeats: Repeats = 3,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also profile: one Chrome trace per batch, t.json as t.batch8.json."),
    ] = None,
    profile_batch: Annotated[
        str | None, typer.Option(help="Batch sizes to profile. Default: all.")
    ] = None,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Time per output token: the floor, our eager mode and transformers in the same run.

    Exits with code 1 if noise exceeds a measurement; the others are still reported.
    """
    from ostinato.bench.decode import run

    results = run(
        replace(config, show_progress=False),
        batches=options.integers(batch, "--batch"),
        baselines=[name for name in baselines.split(",") if name],
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
        profile=profile,
        profile_batches=options.integers(profile_batch, "--profile-batch"),
        show_progress=not quiet,
    )
    _report(results, tables.decode_tables, as_json, output)
    unusable = [
        f"{name} at batch {row['batch']}" for row in results["rows"] for name in row["unusable"]
    ]
    if unusable:
        raise MeasurementError(
            f"noise exceeds {len(unusable)} of the measurements: {', '.join(unusable)}; measure on "
            "a quieter machine, or with more --repeats and --new-tokens"
        )


@app.command()
def plot(
    result: Annotated[
        Path, typer.Argument(help="Output of `bench decode`, `throughput` or `serve`.")
    ],
    out: Annotated[Path, typer.Option(help="The plot: .png, .svg or .pdf.")],
) -> None:
    """Plot the time per output token over the batch size, or tokens/s, with matplotlib."""
    from ostinato.bench.plot import draw_file

    draw_file(result, out)


@app.command()
@options.takes_model(without=("mode",))
def capture(
    *,
    modes: Annotated[str, typer.Option(help="Graph modes to compare.")] = _MODES,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Seconds, bytes and graphs of a capture in each mode, seconds until ready, ledger checks."""
    from ostinato.bench.capture import run

    results = run(replace(config, show_progress=False), modes=modes.split(","))
    _report(results, tables.capture_tables, as_json, output)


@app.command()
@options.takes_model(without=("mode",))
def prefill(
    *,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "16,64,128,256,512",
    modes: Annotated[
        str, typer.Option(help="Besides eager.")
    ] = "PIECEWISE,FULL_AND_PIECEWISE,FULL_AND_FULL",
    repeats: Repeats = 10,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Time to first token of one prompt, eagerly and in each mode, measured in turns."""
    from ostinato.bench.prefill import run

    results = run(
        replace(config, show_progress=False),
        lengths=options.integers(lengths, "--lengths") or [],
        modes=modes.split(","),
        repeats=repeats,
    )
    _report(results, tables.prefill_tables, as_json, output)


@app.command()
@options.takes_model(without=("enable_lora", "max_loras", "max_lora_rank"))
def lora(
    *,
    batch: Batches = "1,8,32",
    adapters: Annotated[int, typer.Option(help="Adapters in a batch, at most.")] = 8,
    rank: Annotated[int, typer.Option(help="Their rank, in all linears.")] = 16,
    prompt_len: PromptLen = 128,
    new_tokens: NewTokens = 128,
    repeats: Repeats = 3,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Time per output token with LoRA adapters, against an engine without LoRA."""
    from ostinato.bench.lora import run

    results = run(
        replace(config, show_progress=False),
        batches=options.integers(batch, "--batch") or [],
        adapters=adapters,
        rank=rank,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
        show_progress=not quiet,
    )
    _report(results, tables.lora_tables, as_json, output)


@app.command()
@options.takes_model(without=("offload",))
def offload(
    *,
    batch: Batches = "1,8",
    group: Annotated[int, typer.Option(help="Layers in a group.")] = 2,
    offloaded: Annotated[int, typer.Option(help="Layers of a group in host memory.")] = 1,
    prefetch: Annotated[int, typer.Option(help="Offloaded layers that are copied ahead.")] = 1,
    plain: Annotated[
        bool, typer.Option(help="Also measure an engine without offload, if the model fits.")
    ] = True,
    prompt_len: PromptLen = 128,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 3,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Time per output token with layers in host memory, against the time of their copies."""
    from ostinato.bench.offload import run

    results = run(
        replace(config, show_progress=False),
        batches=options.integers(batch, "--batch") or [],
        offload=OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch),
        plain=plain,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
        show_progress=not quiet,
    )
    _report(results, tables.offload_tables, as_json, output)


@app.command()
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
    _report(results, tables.sampling_tables, as_json, output)


@app.command()
@options.takes_model(without=("speculative", "max_num_seqs", "max_model_len"))
def spec(
    *,
    batch: Batches = "1",
    num_tokens: Annotated[int, typer.Option(help="Drafts per request and step.")] = 4,
    acceptance: Annotated[
        str, typer.Option(help="Rates at which drafts are right, each from 0 to 1.")
    ] = "1.0,0.7",
    prompt_len: PromptLen = 128,
    new_tokens: NewTokens = 256,
    repeats: Repeats = 5,
    config: EngineConfig,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Tokens per second with drafts right at set rates, and never right, against no drafts."""
    from ostinato.bench.spec import run

    results = run(
        replace(config, show_progress=False),
        batches=options.integers(batch, "--batch") or [],
        num_tokens=num_tokens,
        acceptances=options.numbers(acceptance, "--acceptance"),
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
    )
    _report(results, tables.spec_tables, as_json, output)


@app.command()
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
    )
    _report(results, tables.throughput_tables, as_json, output)


@app.command()
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
    _report(results, serve_tables, as_json, output)


@app.command()
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
    _report(results, parallel_tables.bench_tables, as_json, output)


def _report(
    results: dict[str, Any],
    shown: Callable[[dict[str, Any]], list[RenderableType]],
    as_json: bool,
    output: Path | None,
) -> None:
    if write_results(results, as_json=as_json, output=output):
        return
    console = Console()
    machine = results["machine"]
    console.print(
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"
    )
    for part in shown(results):
        console.print(part)
