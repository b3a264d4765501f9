"""Two layers of a kind stand for all of them: in a step's memory, and in what is warmed up."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ostinato.config import EngineConfig
from ostinato.models.native.decoder import Decoder
from ostinato.runner import startup
from ostinato.runner.startup import kv_budget

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETTINGS: dict[str, Any] = {
    "model": "qwen3-0.6b",
    "random_weights": True,
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "max_model_len": 512,
    "show_progress": False,
}


def test_a_step_of_few_layers_takes_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(**SETTINGS)
    measure = kv_budget.activation_bytes
    measured: list[list[int]] = []

    def spy(*args: Any, **options: Any) -> int:
        measured[-1].append(measure(*args, **options))
        return measured[-1][-1]

    def build() -> None:
        measured.append([])
        runner, _ = startup.build_runner(config, startup.load(config))
        runner.close()

    monkeypatch.setattr(kv_budget, "activation_bytes", spy)
    build()
    build()  # the first of a process also takes what is kept, such as workspaces
    monkeypatch.setattr(Decoder, "few_layers", lambda self: nullcontext())
    build()
    assert measured[1] == measured[2]
    assert len(measured[1]) == 2
    assert all(measured[1])


def test_what_warm_ups_took_is_given_back() -> None:
    """torch keeps freed memory for its stream, and nothing else runs on that of captures."""
    config = EngineConfig(**SETTINGS)
    runner, _ = startup.build_runner(config, startup.load(config))
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() <= 4 * 2**20  # bytes
    runner.close()


# In a process of its own: nothing else has loaded a kernel there.
LOADS = """
import sys, torch, triton
from ostinato.runner import startup
from ostinato.config import EngineConfig

loads = []
def loading(*_args):
    loads.append(torch.cuda.is_current_stream_capturing())
triton.knobs.runtime.kernel_load_start_hook.add(loading)
config = EngineConfig(**eval(sys.argv[1]))
runner, _ = startup.build_runner(config, startup.load(config))
print(len(loads), sum(loads), runner.capture_report.num_graphs)
runner.close()
"""


def test_no_kernel_is_loaded_inside_a_capture() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS, repr(SETTINGS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, in_captures, graphs = map(int, done.stdout.split())
    assert loaded > 20
    assert graphs > 20
    assert in_captures == 0
