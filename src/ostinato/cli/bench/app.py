"""Assembles the commands of ``ostinato bench``."""

from __future__ import annotations

import typer

from ostinato.cli.bench import engine, load, parts

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.command()(parts.core)
app.command()(engine.decode)
app.command()(parts.plot)
app.command()(engine.capture)
app.command()(engine.prefill)
app.command()(engine.lora)
app.command()(engine.offload)
app.command()(parts.sampling)
app.command()(engine.spec)
app.command()(load.throughput)
app.command()(load.serve)
app.command()(parts.parallel)
