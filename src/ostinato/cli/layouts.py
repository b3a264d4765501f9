"""Parallel layouts on the command line: 4x2 is SP 4 and TP 2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.parallel.layout import ParallelLayout

Layouts = Annotated[
    str | None,
    typer.Option(help="SPxTP, as in 8x1,4x2. Default: all of 2 to 8 GPUs that fit the model."),
]


def parse_layouts(text: str | None, option: str) -> list[ParallelLayout] | None:
    """Parse a comma-separated list of layouts."""
    from ostinato.parallel.layout import ParallelLayout

    if text is None:
        return None
    found = [re.fullmatch(r"(\d+)x(\d+)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} takes layouts SPxTP separated by commas, got {text!r}")
    return [ParallelLayout(int(each[1]), int(each[2])) for each in found if each]
