"""The soak script runs, counts, and finds what differs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_vision import save_vision_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


COUNTED = ("aborted", "preemptions", "prefix_hits", "steps", "adapters_loaded", "drafts_accepted")


@pytest.mark.slow
@pytest.mark.parametrize("images", [False, True])
def test_a_small_soak_on_the_cpu_finds_no_difference(
    soak: ModuleType, images: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    options = ["--requests", "90", "--distinct", "12", "--kv-cache-memory-bytes", "320K"]
    options += ["--adapters", "3", "--speculative", "suffix"]
    if images:
        save_vision_model(tmp_path / "model", "qwen3_vl")
        options += ["--model", str(tmp_path / "model"), "--checkpoint", "--images"]
    assert soak.main(["--device", "cpu", *options, "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["requests"] == 90
    assert result["differences"] == 0
    assert result["alone_again"] == 12
    assert min(result[name] for name in COUNTED) > 0
    assert (result["with_images"] > 0) == images
    assert "90 of 90 requests" in capsys.readouterr().out


def test_what_was_never_tested_is_a_failure(
    soak: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--requests", "2", "--distinct", "1", "--kv-cache-memory-bytes", "8M"]
    assert soak.main(["--device", "cpu", *options]) == 1
    assert "nothing was tested of:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "aborted", "differs"),
    [
        ({}, False, False),
        ({"tokens": [1, 2, 4]}, False, True),
        ({"tokens": [1, 2]}, False, True),
        ({"tokens": [1, 2], "logprobs": [-1.0, -2.0]}, True, False),  # a beginning
        ({"tokens": [1, 3]}, True, True),
        ({"tokens": [], "logprobs": []}, True, False),
        ({"reason": "length"}, False, True),
        ({"stop_reason": 3}, False, True),
        ({"logprobs": [-1.0, -2.0, -3.1]}, False, True),
        ({"logprobs": [-1.0, -2.0, -3.0001]}, False, False),
    ],
)
def test_differences_are_counted(
    soak: ModuleType, changes: dict[str, object], aborted: bool, differs: bool
) -> None:
    alone = {
        "tokens": [1, 2, 3],
        "reason": "stop",
        "stop_reason": None,
        "logprobs": [-1.0, -2.0, -3.0],
    }
    tally = soak.Tally()
    got, wanted = soak.Answer(**{**alone, **changes}), soak.Answer(**alone)
    soak.compare(tally, 0, got, wanted, aborted=aborted)
    assert tally.differences == len(tally.shown) == int(differs)
