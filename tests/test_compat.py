"""Private names of other packages: in one module, each explained, no import breaks without them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ostinato
from ostinato import ConfigError, compat
from ostinato.cli.app import app

SOURCE = Path(ostinato.__file__).parent
OTHERS = ("torch", "triton", "transformers")
# Operators may be named _something; and querying a module by name alone does not use it.
ALLOWED = ("torch.ops.", "torch.__")


def private_names_in(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(dotted(node))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name
        for name in names
        if name.startswith(OTHERS)
        and any(part.startswith("_") for part in name.split("."))
        and not name.startswith(ALLOWED)
    }


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_private_names_are_in_compat_alone(file: Path) -> None:
    if file.name != "compat.py":
        assert private_names_in(file) == set()


@pytest.mark.slow
def test_private_attributes_of_others_are_listed_in_compat() -> None:
    """Also those of objects whose module an expression does not show, such as ``config._name``."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
    ours = set().union(*map(names_defined_in, trees.values()))
    listed = {name.path.rpartition(".")[2] for name in compat.private_names}
    standard = {"_replace", "_asdict", "_fields", "_current_frames", "_getframe", "_exit"}
    known = ours | listed | standard
    others = {
        f"{file.relative_to(SOURCE)}:{node.lineno}: {dotted(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in known
        and not re.match(r"(torch\.ops\.)?(aten|_ops)\.", dotted(node))
    }
    assert others == set()


def names_defined_in(tree: ast.Module) -> set[str]:
    """Functions, classes, variables, and attributes of ``self`` and ``cls``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if dotted(node.value) in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # of __slots__ and register_buffer
    return names


def test_each_is_explained_and_listed_once() -> None:
    paths = [name.path for name in compat.private_names]
    assert len(paths) == len(set(paths)) > 30
    for name in compat.private_names:
        assert len(name.purpose) > 7
        assert len(name.without) > 7
        assert name.seen_in


def test_a_missing_name_is_refused_when_it_is_used() -> None:
    name = compat.PrivateName(
        path="torch._C._gone", purpose="tests", without="nothing works", seen_in="no torch"
    )
    assert name.find() is None
    message = r"torch\._C\._gone is missing in this torch \(.*\), and without it nothing works"
    with pytest.raises(ConfigError, match=message):
        name.demand()


@pytest.mark.slow
def test_doctor_works_without_the_packages_of_extras() -> None:
    """transformers has a stand-in for what needs pillow, which raises whatever it is asked."""
    program = """
import sys
for package in ("PIL", "numba", "gguf", "matplotlib", "llguidance", "fastapi", "uvicorn"):
    sys.modules[package] = None
sys.argv = ["ostinato", "doctor", "--json"]
from ostinato.__main__ import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    missing = {name["path"]: name for name in json.loads(result.stdout)["private_names"]["missing"]}
    assert "pillow" in missing[compat.image_processor.path]["without"]


@pytest.mark.slow
def test_no_missing_name_breaks_an_import() -> None:
    """As if torch and the others had none of them; then with those that captures need."""
    program = """
import importlib.util, pkgutil, sys, torch

# What nothing can be captured without.
NEEDED = (
    "torch._ops.OpOverload", "torch._C._dispatch_has_kernel_for_dispatch_key", "torch.ops.aten",
    "torch._C.DispatchKey.CompositeImplicitAutograd", "TorchDispatchMode",
)

def compat_without(kept):
    spec = importlib.util.find_spec("ostinato.compat")
    source = spec.loader.get_source("ostinato.compat")
    start = "    def find(self) -> Any:"
    assert start in source
    early = f"{start}\\n        if not any(each in self.path for each in {kept!r}): return None\\n"
    for name in [name for name in sys.modules if name.startswith("ostinato.")]:
        del sys.modules[name]
    module = sys.modules["ostinato.compat"] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(start, early), "compat.py", "exec"), module.__dict__)
    return module

import ostinato
compat = compat_without(())
assert all(name.find() is None for name in compat.private_names)
for module in pkgutil.walk_packages(ostinato.__path__, "ostinato."):
    if ".triton" in module.name or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # Ray is an extra that the tests do not need
        assert error.name == "ray" and ".replicas" in module.name, error

compat_without(NEEDED)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
fast = ostinato.graphed(model, sizes=[4])
with torch.no_grad():
    for rows in (3, 4, 3):
        x = torch.zeros(4, 4)  # padded as the graph's input is: BLAS rounds other shapes otherwise
        x[:rows].normal_()
        assert torch.equal(fast(x[:rows]), model(x)[:rows])
print("done")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == "done\n", result.stderr


def test_doctor_says_what_is_on_and_why_not() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["environment"]["torch"].startswith(torch.__version__.partition("+")[0])
    paths = {path["name"]: path for path in found["fast_paths"]}
    assert paths["CUDA graphs"]["on"] is torch.cuda.is_available()
    assert all(path["on"] or path["why"] for path in found["fast_paths"])
    listed = found["private_names"]["found"] + len(found["private_names"]["missing"])
    assert listed == len(compat.private_names)
    table = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "Fast paths" in table
    assert "Private names of torch, Triton and transformers:" in table


def test_doctor_says_what_would_be_captured_and_what_runs_eagerly() -> None:
    options = ["--device", "cpu", "--attention", "torch", "--max-num-seqs", "12", "--sizes", "1,8"]
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", *options]).stdout)["graphs"]
    assert found["mode_in_force"] == "FULL_AND_PIECEWISE"
    assert (found["captured_sizes"], found["graph_keys"]) == ([1, 8], 4)
    runs = {each["batch"]: (each["runs"], each["eager"]) for each in found["batches"]}
    assert runs["1 to 8 requests that decode"] == ("FULL graph", False)
    assert runs["9 to 12 requests that decode"] == ("eagerly", True)
    assert runs["1 to 8 tokens, with prompts"] == ("PIECEWISE graph", False)
    reasons = {each["reason"] for each in found["batches"] if each["eager"]}
    assert reasons == {"more tokens than the largest captured size"}
    table = CliRunner().invoke(app, ["doctor", *options], env={"COLUMNS": "200"}).stdout
    assert "9 to 12 requests that decode" in table


def test_doctor_refuses_options_that_no_machine_takes() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--sizes", "0"])
    assert isinstance(answer.exception, ConfigError)
    assert "capture size must be a positive integer, got 0" in str(answer.exception)


def test_a_triton_of_another_version_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compat.triton_launches.cache_clear()
    try:
        answer = CliRunner().invoke(app, ["doctor", "--json"])
    finally:
        compat.triton_launches.cache_clear()
    found = json.loads(answer.stdout)
    assert found["graphs"].keys() == {"error"}  # the device is not there
    paths = {path["name"]: path for path in found["fast_paths"]}
    launch = paths["fast launches of Triton kernels"]
    assert launch["on"] is False
    ahead = paths["Triton kernels compiled side by side at start-up"]
    assert not ahead["on"]
    assert "one after another" in ahead["why"]
    assert "takes about 20 us longer" in launch["why"]
    hopper = paths["kernels written for Hopper"]
    assert not hopper["on"]
    assert "attend half as fast" in hopper["why"]
    (logged,) = [text for text in caplog.messages if text.startswith("Triton 3.7.0: ")]
    assert "torch 2.11 comes with it" in logged
