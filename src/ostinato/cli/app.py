"""Assembles the commands and shows their errors."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from ostinato.cli import doctor, model, plan, report, serve, verify
from ostinato.cli.bench.app import app as bench_app
from ostinato.cli.console import console
from ostinato.errors import OstinatoError


class _App(typer.Typer):
    """Prints Ostinato's own errors as one red line instead of a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except OstinatoError as error:
            # As Text, since a message may contain what looks like markup; unwrapped, so that it can
            # be searched and copied.
            name, message = type(error).__name__, " ".join(str(error).splitlines())
            line = Text.assemble((f"{name}:", "red"), f" {message}")
            console(stderr=True).print(line, soft_wrap=True, highlight=False)
            sys.exit(1)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            sys.stdout = io.StringIO()  # or Python fails at its end, flushing the rest
            sys.exit(f"ostinato: stdout cannot be written: {error.strerror}")


app = _App(
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    help="CUDA graphs for LLM inference.",
)
app.add_typer(bench_app, name="bench")
app.add_typer(plan.app, name="plan")
app.command()(model.generate)
app.command()(serve.serve)
app.command()(model.capture)
app.command()(model.explain)
app.command()(model.tune)
app.command()(verify.verify)
app.command()(doctor.doctor)
app.command()(report.report)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """CUDA graphs for LLM inference."""
    if version:
        _print_version()
        raise typer.Exit


@app.command("version")
def _print_version() -> None:
    """Print the version."""
    from ostinato import __version__

    console().print(__version__, highlight=False)
