"""Runs the ``ostinato`` command in the process of a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ostinato import cli


@dataclass(frozen=True)
class Result:
    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout, which must be just JSON."""
        assert self.exit_code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Result]


def command_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command the way the installed script does; made of a test's own fixtures."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.app(list(arguments))
        return Result(int(end.value.code or 0), *capfd.readouterr())

    return run
