"""Sleep and weight updates on CUDA: memory by the driver's count, two processes on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_models import TINY_NATIVE
from weight_sets import WeightSets, open_llm, tokens_of

from ostinato import LLM, AsleepError, GraphConfig, SleepError, compilation_counter, open_weights
from ostinato.runner.sleep.sleep_memory import SleepMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
TRAINER = """
import sys, torch
from safetensors.torch import load_file
from ostinato import share_weights
kept = load_file(sys.argv[1], device="cuda")
print(share_weights(kept), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "ab")


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.slow
@pytest.mark.alone
def test_weights_and_kv_cache_are_given_back() -> None:
    """Weights of 2.3 GiB and 8 GiB of KV cache; a device that is full when they come back."""
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 512, "show_progress": False}
    graphs = GraphConfig(capture_sizes=[1, 8])
    with LLM(
        "llama-3.2-1b",
        random_weights=True,
        enable_sleep_mode=True,
        kv_cache_memory_bytes="8G",
        graphs=graphs,
        **options,
    ) as llm:
        module: Any = llm.engine.model
        caches = [each for layer in llm.engine.runner.kv_cache.layers for each in layer]
        num_bytes = sum(each.nbytes for each in (*module.parameters(), *caches))
        assert num_bytes > 10_000 * MIB
        expected = tokens_of(llm)
        before = free_bytes()
        with compilation_counter.expect(num_cudagraph_captured=0):
            llm.sleep()
            assert free_bytes() - before >= num_bytes
            llm.wake()
            assert before - free_bytes() <= 64 * MIB
            llm.ledger().check(thorough=True)
            assert tokens_of(llm) == expected
            llm.sleep()
            check_no_room(llm)
            llm.wake()
            assert tokens_of(llm) == expected
        llm.sleep(level=2)
        assert free_bytes() - before >= num_bytes - 64 * MIB
        llm.wake()
        assert not any(each.any() for each in (*module.parameters(), *caches))


def check_no_room(llm: LLM) -> None:
    taken = torch.empty(free_bytes() - 1024 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        before = free_bytes()
        with pytest.raises(SleepError, match=r"cannot wake: cuMemCreate found no memory"):
            llm.wake()
        assert free_bytes() >= before
    with pytest.raises(AsleepError):
        tokens_of(llm)
    del taken
    torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_waking_again_after_an_interrupt(
    sets: WeightSets, monkeypatch: pytest.MonkeyPatch, level: Literal[1, 2]
) -> None:
    """A second Ctrl-C comes when the memory is mapped, and the weights are not back yet."""
    with open_llm(sets.paths["a"], "cuda", enable_sleep_mode=True) as llm:
        assert tokens_of(llm) == sets.tokens("a")
        llm.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr(SleepMemory, "_refill", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.wake()
        assert llm.sleep_level == level
        llm.wake()
        if level == 2:
            llm.update_weights(sets.paths["a"])
        assert tokens_of(llm) == sets.tokens("a")


def _interrupted(memory: SleepMemory) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.alone
def test_closed_engines_keep_nothing(sets: WeightSets) -> None:
    def live(asleep: bool) -> None:
        options = {"enable_sleep_mode": True, "kv_cache_memory_bytes": "64M"}
        with open_llm(sets.paths["a"], "cuda", **options) as llm:
            assert tokens_of(llm) == sets.tokens("a")
            if asleep:
                llm.sleep(level=2)

    live(False)
    torch.cuda.empty_cache()
    before = free_bytes()
    for asleep in (True, False, True):
        live(asleep)
    torch.cuda.empty_cache()
    assert before - free_bytes() <= 32 * MIB


@pytest.mark.slow
def test_weights_of_another_process(sets: WeightSets) -> None:
    path = os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(sets.paths["b"] / "model.safetensors")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parents[2],
    )
    assert trainer.stdout is not None
    with open_llm(sets.paths["a"], "cuda", enable_sleep_mode=True) as llm:
        addresses = [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
        message = trainer.stdout.readline()
        with compilation_counter.expect(num_cudagraph_captured=0):
            weights = open_weights(message)
            assert {each.device.type for each in weights.values()} == {"cuda"}
            llm.update_weights(weights)
            assert tokens_of(llm) == sets.tokens("b") != sets.tokens("a")
            del weights
            llm.sleep(level=2)
            llm.wake()
            llm.update_weights(open_weights(message))
            assert tokens_of(llm) == sets.tokens("b")
        assert addresses == [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
    trainer.communicate("\n", timeout=60)
    assert trainer.returncode == 0
