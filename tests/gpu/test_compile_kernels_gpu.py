"""Kernels compiled side by side at start-up: none is left to compile, and tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# In a process with an empty cache of its own, without a main guard.
PROGRAM = """
import json, sys, triton
from ostinato import LLM, SamplingParams
from ostinato.runner.startup import build

ahead = sys.argv[1] == "ahead"
compiled, names, done = build.compile_kernels, [], []

def listen(src, **_):
    names.append(src.name)

def compile_kernels(*args, **options):
    if ahead:
        compiled(*args, **options)
    done.append(len(names))

triton.knobs.compilation.listener = listen
build.compile_kernels = compile_kernels
with LLM(
    "qwen3-0.6b", random_weights=True, device="cuda", dtype="bfloat16", max_num_seqs=64,
    max_num_batched_tokens=1024, max_model_len=512, show_progress=False,
) as llm:
    at_start = len(names)
    prompts = [{"prompt_token_ids": list(range(1, 1 + size))} for size in (5, 40, 300)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.8, seed=3))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
print(json.dumps(
    {"ahead": names[: done[0]], "capture": names[done[0] : at_start], "tokens": tokens}
))
"""


def start(how: str, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be compiled ahead" not in done.stderr
    assert "one after another" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_nothing_is_left_to_compile_and_tokens_are_the_same(tmp_path: Path) -> None:
    ahead, usual = start("ahead", tmp_path / "ahead"), start("usual", tmp_path / "usual")
    assert ahead["capture"] == []
    assert usual["ahead"] == []
    assert set(usual["capture"]) <= set(ahead["ahead"])
    assert len(ahead["ahead"]) >= len(usual["capture"]) > 20
    assert ahead["tokens"] == usual["tokens"]
