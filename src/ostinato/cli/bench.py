"""``ostinato bench``: measurements, as tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ostinato.cli import options

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


_MODES = "FULL_DECODE_ONLY,PIECEWISE,FULL_AND_PIECEWISE,FULL"
Output = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


@app.command()
def core(as_json: options.Json = False, output: Output = None) -> None:
    """Cost of dispatch and wrapper; replay against eager; graphed() against torch's own ways."""
    from ostinato.bench.core import run

    _report(run(), _core_tables, as_json, output)


@app.command()
def decode(
    batch: Annotated[str, typer.Option(help="Batch sizes: 1,8,32.")] = "1,8",
    baselines: Annotated[str, typer.Option(help="Of eager, hf; empty for none.")] = "eager,hf",
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens to measure over.")] = 128,
    repeats: Annotated[int, typer.Option(help="Medians over this many.")] = 3,
    model: options.Model = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    mode: options.Mode = None,
    sizes: options.Sizes = None,
    compiled: options.Compile = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KVCacheMemory = None,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Time per output token, against our eager mode and transformers in the same run."""
    from ostinato.bench.decode import run

    config = options.engine_config(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        mode=mode,
        sizes=sizes,
        compiled=compiled,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        quiet=True,
    )
    results = run(
        config,
        batches=options.integers(batch, "--batch") or [],
        baselines=[name for name in baselines.split(",") if name],
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
    )
    _report(results, _decode_tables, as_json, output)


@app.command()
def capture(
    modes: Annotated[str, typer.Option(help="Graph modes to compare.")] = _MODES,
    model: options.Model = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    sizes: options.Sizes = None,
    compiled: options.Compile = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KVCacheMemory = None,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Seconds, bytes and graphs of the capture in each mode, and seconds until ready."""
    from ostinato.bench.capture import run

    config = options.engine_config(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        mode=None,
        sizes=sizes,
        compiled=compiled,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        quiet=True,
    )
    _report(run(config, modes=modes.split(",")), _capture_tables, as_json, output)


@app.command()
def prefill(
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "16,64,128,256,512",
    modes: Annotated[str, typer.Option(help="Beside eager.")] = "PIECEWISE,FULL_AND_PIECEWISE",
    repeats: Annotated[int, typer.Option(help="Medians over this many.")] = 10,
    model: options.Model = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    sizes: options.Sizes = None,
    compiled: options.Compile = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KVCacheMemory = None,
    as_json: options.Json = False,
    output: Output = None,
) -> None:
    """Time to first token of one prompt, eagerly and in each mode, in turns."""
    from ostinato.bench.prefill import run

    config = options.engine_config(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        mode=None,
        sizes=sizes,
        compiled=compiled,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        quiet=True,
    )
    prompt_lengths = options.integers(lengths, "--lengths") or []
    results = run(config, lengths=prompt_lengths, modes=modes.split(","), repeats=repeats)
    _report(results, _prefill_tables, as_json, output)


def _report(
    results: dict[str, Any],
    tables: Callable[[dict[str, Any]], list[Table]],
    as_json: bool,
    output: Path | None,
) -> None:
    # The command as it was given, so that a result file says how to make it again; where the file
    # went is nobody's business.
    given = sys.argv[1:]
    if "--output" in given:
        place = given.index("--output")
        given = given[:place] + given[place + 2 :]
    results["command"] = " ".join(["ostinato", *given])
    text = json.dumps(results, indent=2) + "\n"
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
        return
    console = Console()
    machine = results["machine"]
    console.print(
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"
    )
    for table in tables(results):
        console.print(table)


def _core_tables(results: dict[str, Any]) -> list[Table]:
    stream = [_stream_table(results["stream"])] if "stream" in results else []
    return [_core_table(results), *stream]


def _decode_tables(results: dict[str, Any]) -> list[Table]:
    title = f"{results['model']}, {results['dtype']}, {results['mode']}"
    table = Table(title=title)
    for column in ("batch", "", "per token", "tokens/s", "ostinato is", "same tokens"):
        table.add_column(column, justify="left" if not column else "right")
    for row in results["rows"]:
        for name, milliseconds in row["tpot_ms"].items():
            same = row["same_tokens_as"].get(name)
            table.add_row(
                str(row["batch"]),
                name,
                f"{milliseconds:.2f} ms",
                f"{row['tokens_per_s'][name]:.1f}",
                f"{row['speedup_over'][name]:.2f}x" if name in row["speedup_over"] else "",
                "" if same is None else ("yes" if same else "NO"),
            )
    return [table]


def _capture_tables(results: dict[str, Any]) -> list[Table]:
    table = Table(title=f"{results['model']}: capture")
    for column in ("mode", "graphs", "capture", "memory", "until ready"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in results["rows"]:
        table.add_row(
            row["mode"],
            str(row["graphs"]),
            f"{row['capture_s']:.2f} s",
            f"{row['bytes'] / 2**20:.1f} MiB",
            f"{row['ready_s']:.2f} s",
        )
    return [table]


def _prefill_tables(results: dict[str, Any]) -> list[Table]:
    table = Table(title=f"{results['model']}: time to first token")
    for column in ("prompt", "mode", "median", "of eager", "same token"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in results["rows"]:
        for name, milliseconds in row["ttft_ms"].items():
            table.add_row(
                str(row["prompt_len"]),
                name,
                f"{milliseconds:.2f} ms",
                f"{row['fraction_of_eager'][name]:.2f}",
                "yes" if row["same_tokens_as_eager"][name] else "NO",
            )
    return [table]


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
