"""Benchmarks of an engine: its captures, and the time of its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli import options
from ostinato.cli.bench.report import Batches, NewTokens, Output, PromptLen, Repeats, report
from ostinato.cli.tables import bench_tables as tables
from ostinato.config import EngineConfig
from ostinato.errors import MeasurementError
from ostinato.offload.offload_config import OffloadConfig

_MODES = "FULL_DECODE_ONLY,PIECEWISE,FULL_AND_PIECEWISE,FULL,FULL_AND_FULL"


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
    report(results, tables.decode_tables, as_json, output)
    unusable = [
        f"{name} at batch {row['batch']}" for row in results["rows"] for name in row["unusable"]
    ]
    if unusable:
        raise MeasurementError(
            f"noise exceeds {len(unusable)} of the measurements: {', '.join(unusable)}; measure on "
            "a quieter machine, or with more --repeats and --new-tokens"
        )


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
    report(results, tables.capture_tables, as_json, output)


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
    report(results, tables.prefill_tables, as_json, output)


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
    report(results, tables.lora_tables, as_json, output)


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
    report(results, tables.offload_tables, as_json, output)


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
    report(results, tables.spec_tables, as_json, output)
