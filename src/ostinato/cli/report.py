"""``ostinato report``: the page of a run, from the file that the run has written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.cli.console import console
from ostinato.cli.results import output_file
from ostinato.errors import ConfigError
from ostinato.paths import writing

if TYPE_CHECKING:
    from ostinato.llm import LLM

RunFile = Annotated[
    Path | None,
    output_file("--report", help_text="Write a report of the run to this file, as JSON."),
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
    if page.resolve() == run.resolve():
        raise ConfigError(f"the page would replace {run}; choose another file with --output")
    text = report_page(read_report(run))
    with writing(page):
        page.write_text(text, encoding="utf-8")
    console().print(f"{page}: {len(text.encode()):,} bytes", highlight=False, soft_wrap=True)


def write_run_file(llm: LLM, path: Path | None) -> None:
    """Write the report of a run, if one was asked for."""
    from ostinato.report.run_file import write_report

    if path is not None:
        write_report(llm.report(), path)
