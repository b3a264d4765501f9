"""Commands that run a model, or explain how one would run: generate, capture, explain, tune."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from ostinato.cli import options
from ostinato.cli.console import console
from ostinato.cli.report import RunFile, write_run_file
from ostinato.config import EngineConfig

if TYPE_CHECKING:
    from ostinato.llm import LLM


@options.takes_model()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete, or to answer with --chat.")],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="In (0, 1].")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of a LoRA adapter, in PEFT's format.")
    ] = None,
    report: RunFile = None,
    config: EngineConfig,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Complete a prompt; text appears as it is generated."""
    from ostinato.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if adapter is not None:
        config = replace(config, enable_lora=True)
    with _open(config, quiet=quiet or as_json) as llm:
        name = None if adapter is None else str(adapter)
        if name is not None:
            llm.load_adapter(name, name)
        question: Any = [{"role": "user", "content": prompt}]
        asked = llm.render_chat(question) if chat else _as_prompt(llm, prompt)
        if as_json:
            (result,) = llm.generate(asked, params, adapter=name)
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
            write_run_file(llm, report)
            return
        for delta in llm.stream(asked, params, adapter=name):
            sys.stdout.write(delta.text if llm.tokenizer else f"{delta.token_ids} ")
            sys.stdout.flush()
        sys.stdout.write("\n")
        write_run_file(llm, report)


@options.takes_model()
def capture(
    *,
    config: EngineConfig,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Capture a model's graphs, and show each one: key, nodes, bytes, milliseconds."""
    with _open(config, quiet=quiet or as_json) as llm:
        runner = llm.engine.runner
        reports = [
            (report, report.entry.phase, runner.num_nodes(report.entry))
            for report in runner.capture_report.entries
        ]
        if runner.images is not None:
            encoder = runner.images.vision.capture_report.entries
            reports += [(report, "image, PIECEWISE", None) for report in encoder]
        rows = [
            {
                "phase": phase,
                "num_tokens": report.entry.descriptor.num_tokens,
                "num_reqs": report.entry.descriptor.num_reqs,
                **(
                    {"adapters": report.entry.descriptor.num_active_loras}
                    if config.enable_lora
                    else {}
                ),
                "graphs": report.num_graphs,
                "nodes": nodes,
                "bytes": report.num_bytes,
                "ms": round(report.seconds * 1e3, 2),
            }
            for report, phase, nodes in reports
        ]
        resolved, memory = llm.engine.resolved_mode, llm.graph_memory
    if as_json:
        for row, (report, *_) in zip(rows, reports, strict=True):
            row["executable_bytes"] = report.executable_bytes
        answer = {"mode": resolved.mode.name, "graphs": rows, "memory": asdict(memory)}
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    table = Table(title=f"{len(rows)} sizes captured, mode {resolved.mode.name}")
    for column in rows[0] if rows else ("nothing captured",):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    out = console()
    out.print(table)
    out.print(f"memory estimated: {memory.estimated}")
    out.print(f"memory taken:     {memory.taken}")
    for kind, sizes in (("decode", memory.dropped_decode), ("mixed", memory.dropped_mixed)):
        if sizes:
            out.print(f"left out, by graph_memory: {kind} sizes {_cell(list(sizes))}")


@options.takes_model(only=options.OF_PLANS)
def explain(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens in the batch, before padding.")],
    reqs: Annotated[int, typer.Option(help="Requests in the batch.")],
    max_query_len: Annotated[
        int | None, typer.Option(help="Most tokens in one request. Default: an even split.")
    ] = None,
    adapters: Annotated[int, typer.Option(help="Different LoRA adapters in the batch.")] = 0,
    patches: Annotated[int, typer.Option(help="Patches of images to encode first.")] = 0,
    config: EngineConfig,
    as_json: options.Json = False,
) -> None:
    """Show which graph would run a batch, and why. Loads no model."""
    from ostinato.engine.explain import explain_batch

    explanation = explain_batch(
        replace(config, show_progress=False),
        num_tokens=tokens,
        num_reqs=reqs,
        max_query_len=max_query_len,
        num_active_loras=adapters,
        num_patches=patches,
    )
    if as_json:
        sys.stdout.write(json.dumps(explanation) + "\n")
        return
    table = Table("", Column(overflow="fold"), show_header=False)
    for name, value in explanation.items():
        table.add_row(name.replace("_", " "), _cell(value))
    console().print(table)


@options.takes_model(
    only=("model", "random_weights", "device", "dtype", "swiftkv_layers", *options.OF_RANKS)
)
def tune(
    *,
    config: EngineConfig,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the best kernels for a model's small-M GEMMs on this GPU, and save them."""
    from ostinato.engine.tune import tune as tune_model

    choices = tune_model(replace(config, show_progress=not (quiet or as_json)))
    if as_json:
        sys.stdout.write(json.dumps(choices) + "\n")
        return
    table = Table("GEMM", "choice", title=f"{len(choices)} kinds of GEMMs")
    for key, choice in choices.items():
        table.add_row(key, choice)
    console().print(table)


@contextmanager
def _open(config: EngineConfig, *, quiet: bool) -> Iterator[LLM]:
    from ostinato.llm import LLM

    with LLM.from_config(replace(config, show_progress=not quiet)) as llm:
        yield llm


def _as_prompt(llm: LLM, prompt: str) -> Any:
    """Models without a tokenizer take token ids on the command line: "1,2,3"."""
    return prompt if llm.tokenizer else options.integers(prompt, "the prompt of this model")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
