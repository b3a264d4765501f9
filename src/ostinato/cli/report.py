"""``ostinato report``: the page of a run, from the file that the run has written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.llm import LLM

RunFile = Annotated[
    Path | None,
    typer.Option("--report", help="Write a report of the run to this file, as JSON."),
]


def report(
    run: Annotated[Path, typer.Argument(help="The file that --report or LLM.report() made.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page. Default: beside the file.")
    ] = None,
) -> None:
    """Turn the report of a run into one HTML page that needs nothing else."""
    from ostinato.report.page import report_page
    from ostinato.report.run_file import read_report

    page = run.with_suffix(".html") if output is None else output
    if page == run:
        raise ConfigError(f"the page would replace {run}; choose another file with --output")
    text = report_page(read_report(run))
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror or error}") from None
    Console().print(f"{page}: {len(text.encode()):,} bytes", highlight=False, soft_wrap=True)


def check_run_file(path: Path | None) -> None:
    """Raise before a long run if its report could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--report {path}: there is no directory {path.absolute().parent}")


def write_run_file(llm: LLM, path: Path | None) -> None:
    """Write the report of a run, if one was asked for."""
    from ostinato.report.run_file import write_report

    if path is not None:
        write_report(llm.report(), path)
