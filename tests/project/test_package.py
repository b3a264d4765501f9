"""What is installed: the library by itself, the runtime with its packages, the command."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ostinato

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
LIBRARY_ONLY = """
import sys

class Absent:  # what `pip install ostinato` does not bring
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])

sys.meta_path.insert(0, Absent())
"""


def run_without(packages: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    code = LIBRARY_ONLY.format(absent=repr(packages)) + program
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_library_needs_none_of_the_runtime() -> None:
    program = """
import torch, ostinato
double = ostinato.graphed(lambda x: x * 2, sizes=[4])
assert double(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3
ostinato.CudaGraphManager, ostinato.CUDAGraphWrapper, ostinato.CapturePlan, ostinato.SamplingParams
try:
    ostinato.LLM("tiny", random_weights=True)
except ImportError as error:
    print(error)
"""
    absent = ("transformers", "tokenizers", "safetensors", "filelock", "typer", "rich")
    result = run_without(absent, program)
    assert result.returncode == 0, result.stderr
    assert "ostinato.LLM needs the package" in result.stdout
    assert "pip install 'ostinato[llm]'" in result.stdout


def test_the_command_says_what_it_needs() -> None:
    program = "import ostinato.__main__; ostinato.__main__.main()"
    result = run_without(("typer",), program)
    assert result.returncode == 1
    expected = "the ostinato command needs the package typer: pip install 'ostinato[llm]'\n"
    assert result.stderr == expected


def test_the_command_is_a_module_too() -> None:
    command = [sys.executable, "-m", "ostinato", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"{ostinato.__version__}\n"


def test_versions_agree() -> None:
    assert PYPROJECT["version"] == ostinato.__version__


def test_all_public_names_are_there_and_typed() -> None:
    source = ast.parse(Path(ostinato.__file__).read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname for node in imports for alias in node.names}
    for name in ostinato.__all__:
        assert getattr(ostinato, name) is not None
        assert name == "__version__" or name in typed


# Errors and enumerations; and what is made by graphed(), where the options are explained.
EXPLAINED_ELSEWHERE = (Exception, enum.Enum, ostinato.GraphedCallable, ostinato.GraphedModule)


@pytest.mark.parametrize("name", [name for name in ostinato.__all__ if name[0] != "_"])
def test_help_explains_every_parameter(name: str) -> None:
    thing = getattr(ostinato, name)
    assert thing.__doc__
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, EXPLAINED_ELSEWHERE)):
        return
    parameters = inspect.signature(thing).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {each.name for each in parameters if each.kind not in variadic}
    unexplained = {each for each in given if not re.search(rf"\b{each}\b", thing.__doc__)}
    assert not unexplained
    if any(each.default is None for each in parameters):
        assert re.search(r"\bNone\b|\bnone\b|defaults to", thing.__doc__), "what None means"
