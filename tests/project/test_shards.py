"""``tests/shards.py``: every selected test runs once, and nothing that goes wrong is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARDS = Path(__file__).parents[1] / "shards.py"
pytestmark = pytest.mark.slow

MANY = """
import pytest

@pytest.mark.wanted
@pytest.mark.parametrize("n", range(240))
def test_many(n):
    pass

@pytest.mark.wanted
@pytest.mark.alone
def test_alone():
    pytest.skip("not here")

def test_unwanted():
    raise AssertionError
"""
BAD = {
    "fails": "assert 3 == 4",
    "dies": "__import__('os')._exit(0)",
    "raises_at_exit": "__import__('atexit').register(lambda: 1 / 0)",
}


def run(directory: Path, **files: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    wanted\n    alone\n")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, str(SHARDS), "-m", "wanted", "--jobs", "2"],
        cwd=directory,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_counts_are_those_of_all_processes(tmp_path: Path) -> None:
    done = run(tmp_path, many=MANY)
    assert done.returncode == 0, done.stdout + done.stderr
    *processes, total = done.stdout.splitlines()
    assert [line.partition(" in ")[0] for line in processes] == [
        *["test_many.py: 120 passed"] * 2,
        "test_many.py: 1 skipped",
    ]
    assert total.startswith("240 passed, 1 skipped in ")


def test_what_goes_wrong_is_shown(tmp_path: Path) -> None:
    test = "import pytest\n\n@pytest.mark.wanted\ndef test_it():\n    {}\n"
    done = run(tmp_path, **{name: test.format(line) for name, line in BAD.items()})
    assert done.returncode == 1
    assert done.stdout.count(" FAILED (exit code ") == len(BAD)
    assert "assert 3 == 4" in done.stdout
    assert "test_dies.py:  FAILED (exit code 0)" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "1 failed, 1 passed in" in done.stdout.splitlines()[-1]


def test_a_file_that_cannot_be_imported_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, extra="import no_such_module")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr
    assert "collecting the tests failed" in done.stderr


def test_no_tests_are_no_success(tmp_path: Path) -> None:
    done = run(tmp_path, extra="def test_unwanted(): pass")
    assert done.returncode == 1
    assert done.stdout.startswith("no tests in ")
