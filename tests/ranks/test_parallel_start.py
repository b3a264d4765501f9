"""Ranks that ``LLM`` starts itself, and ranks that torchrun starts: start, end, and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ostinato import LLM, GraphConfig, NgramDrafts, SamplingParams
from ostinato.errors import ConfigError

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "model": "tiny",
    "random_weights": True,
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "graphs": GraphConfig(capture_sizes=[1, 2, 4]),
    "show_progress": False,
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [100] * 17]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=30, temperature=0.9, seed=5),
    SamplingParams(max_tokens=20, temperature=0, logprobs=1),
]
TIMEOUT_S = 4.0  # long enough for a busy machine not to look silent


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with LLM(**TINY) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        return tokens + come_and_go(llm)


def come_and_go(llm: LLM) -> list[list[int]]:
    """Requests that join in the middle, and one that is aborted."""
    engine, step = llm.engine, 0
    completions = [
        engine.prepare_request([number * 11 + i for i in range(1 + 9 * number)], PARAMS[1])[0]
        for number in range(6)
    ]
    while step < 12 or engine.has_unfinished:
        if step % 2 == 0 and step // 2 < len(completions):
            engine.add(completions[step // 2])
        if step == 7:
            engine.abort(completions[1])
        engine.step()
        step += 1
    return [completion.output.token_ids for completion in completions]


def pid_of_rank_1(llm: LLM) -> int:
    ranks: Any = llm.engine.runner._world._dead_rank.__self__  # type: ignore[attr-defined]
    pid: int = ranks._processes[0].pid
    return pid


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def interrupt_in_the_middle_of_a_step(llm: LLM) -> None:
    state = llm.engine.runner.state
    update, steps = state.update, 0

    def interrupted(plan: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # rank 1 has the plan, and waits for this rank in the first layer
            os.kill(os.getpid(), signal.SIGINT)
        update(plan)

    state.update = interrupted  # type: ignore[method-assign]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(**TINY, tensor_parallel_size=2, rank_timeout_s=TIMEOUT_S) as llm:
        yield llm


def test_ranks_are_started_and_ended(alone: list[list[int]], llm: LLM) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert handlers == [signal.default_int_handler, signal.SIG_DFL], "torch's launcher took them"
    pid = pid_of_rank_1(llm)
    outputs = llm.generate(PROMPTS, PARAMS)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens + come_and_go(llm) == alone
    assert llm.engine.runner.stats.hits > 20

    interrupt_in_the_middle_of_a_step(llm)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    again = llm.generate(PROMPTS, PARAMS)  # the ranks are still in step
    assert [output.outputs[0].token_ids for output in again] == tokens

    llm.close()
    llm.close()
    assert gone(pid)
    assert not dist.is_initialized()


def test_drafts_whose_class_a_started_rank_cannot_import() -> None:
    class Local(NgramDrafts):
        pass

    class OfTheScript(NgramDrafts):
        __module__, __qualname__ = "__main__", "OfTheScript"

    for drafts in (Local(), OfTheScript()):
        name = type(drafts).__name__
        with pytest.raises(ConfigError, match=f"the started ranks cannot import {name} "):
            LLM(**TINY, data_parallel_size=2, speculative=drafts)


SCRIPT = """
import sys
from ostinato import LLM, GraphConfig, SamplingParams

# No main guard, and nothing is closed.
llm = LLM("tiny", random_weights=True, device="cpu", max_model_len=128, show_progress=False,
          graphs=GraphConfig(capture_sizes=[1, 2, 4]), tensor_parallel_size=2)
output = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=12, temperature=0))[0]
sys.stdout.write(f"{output.outputs[0].token_ids}\\n")
"""


@pytest.mark.parametrize("torchrun", [False, True], ids=["plain", "torchrun"])
def test_scripts(alone: list[list[int]], tmp_path: Path, torchrun: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *(launcher if torchrun else []), str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    # Under torchrun every rank runs the script and gets the result.
    assert done.stdout.splitlines() == [str(alone[0])] * (2 if torchrun else 1), done.stderr
    assert "Traceback" not in done.stderr
