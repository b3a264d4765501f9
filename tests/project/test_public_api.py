"""The public names, the command line, and what importing costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import ostinato
from ostinato import cli
from ostinato.bench.core import run as bench_core


def test_every_public_name_resolves() -> None:
    assert all(getattr(ostinato, name) is not None for name in ostinato.__all__)
    assert set(ostinato.__all__) <= set(dir(ostinato))


def test_unknown_names_raise() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = ostinato.nothing


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import ostinato, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_capturing_does_not_import_the_compiler() -> None:
    """torch._dynamo takes two seconds to import, and a mode used carelessly would import it."""
    program = (
        "import sys, torch, ostinato\n"
        "ostinato.graphed(torch.relu, sizes=[2])(torch.ones(2))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_version_command() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    assert result.exit_code == 0
    assert ostinato.__version__ in result.output


RESULTS = {
    "command": "ostinato bench core",
    "machine": {"gpu": "Some GPU", "cpu": "Some CPU", "torch": "2.0", "date": "2026-01-01"},
    "dispatch_us": {"4": 0.25, "400": 0.26},
    "wrapper_us": {"cpu": {"wrapped": 9.0, "bare_replay": 6.5, "own_cost": 2.5}},
    "cpu_decoder": [{"batch": 1, "eager_ms": 20.0, "replay_ms": 18.0, "ratio": 0.9}],
    "stream": [{"name": "eager", "total_s": 1.5, "first_1000_s": 2.0, "peak_mib": 64.0}],
}


def test_bench_core_shows_a_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(bench_core, "run", lambda: RESULTS)
    path = tmp_path / "core.json"
    shown = CliRunner().invoke(cli.app, ["bench", "core", "--output", str(path)])
    assert shown.exit_code == 0, shown.output
    for text in ("Some GPU", "0.26 µs", "2.50 µs", "0.90", "1500 ms", "64 MiB"):
        assert text in shown.output
    assert json.loads(path.read_text()) == RESULTS
    printed = CliRunner().invoke(cli.app, ["bench", "core", "--json"])
    assert json.loads(printed.output) == RESULTS


@pytest.mark.slow
def test_bench_runs_its_measurements() -> None:
    """That they run; what they measure is for `ostinato bench`."""
    assert bench_core.dispatch_microseconds(4) > 0
    cost = bench_core.wrapper_microseconds(torch.device("cpu"))
    assert cost["own_cost"] == pytest.approx(cost["wrapped"] - cost["bare_replay"])
