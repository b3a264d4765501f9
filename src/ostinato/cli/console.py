"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: a path or a message may look like Rich's markup."""
    return Console(stderr=stderr, markup=False)
