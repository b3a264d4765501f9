"""Ranks that beat while their main thread hangs: which one is named, and when."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_parallel_start import PARAMS, PROMPTS, TINY, gone, pid_of_rank_1
from workers import GlooPool, WorkerDiedError

from ostinato import LLM, SamplingParams
from ostinato.errors import RankFailedError

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("forked_ranks")]

TIMEOUT_S = 2.5
WATCHED: dict[str, Any] = {**TINY, "rank_timeout_s": TIMEOUT_S}
# The timeout plus a tenth, and three seconds for a busy machine.
KNOWN_S = 1.1 * TIMEOUT_S + 3


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def in_rank(rank: int, code: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rank started under this number run ``code`` before anything else."""
    guarded = f"import sys, time\nif sys.argv[:1] == ['-m'] and sys.argv[-1] == '{rank}':\n{code}"
    (directory / "sitecustomize.py").write_text(guarded)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)


# Sleeps at the n-th call of a method, for the seconds given in SLEEPS.
SLEEPY = """
    from {module} import {name}
    calls, method = [], {name}.{method}
    def sleepy(*args):
        calls.append(1)
        time.sleep({sleeps}.get(len(calls), 0))
        return method(*args)
    {name}.{method} = sleepy
"""


def test_a_rank_that_hangs_in_a_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that is only slow is not named, nor is any rank while rank 0 is idle."""
    sleeps = {5: 0.3 * TIMEOUT_S, 40: 1000}
    in_step = {"module": "ostinato.runner.model_runner", "name": "ModelRunner"}
    in_rank(1, SLEEPY.format(**in_step, method="run", sleeps=sleeps), tmp_path, monkeypatch)
    with LLM(**WATCHED, tensor_parallel_size=2) as llm:
        pid = pid_of_rank_1(llm)
        tokens = llm.generate(PROMPTS[0], PARAMS[0])[0].outputs[0].token_ids
        time.sleep(2 * TIMEOUT_S)
        assert llm.generate(PROMPTS[0], PARAMS[0])[0].outputs[0].token_ids == tokens
        start = time.monotonic()
        with pytest.raises(
            RankFailedError, match=r"rank 1 has been in step 40 for .* rank 0 wa"
        ) as c:
            llm.generate(PROMPTS, SamplingParams(max_tokens=100))
        assert time.monotonic() - start < KNOWN_S
        assert c.value.rank == 1
        with pytest.raises(RankFailedError, match="rank 1 has been in step 40"):
            llm.generate(PROMPTS)
    assert gone(pid)
    log = capfd.readouterr().err
    assert re.search(r"rank 1 has held up the others for .* here:(\n.*)*in sleepy\n", log)


def test_of_many_ranks_the_one_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that finds the failure ends; the others report the failure, not that rank's end."""
    channel = {"module": "ostinato.ranks.channel", "name": "Channel"}
    in_rank(2, SLEEPY.format(**channel, method="receive", sleeps={6: 1000}), tmp_path, monkeypatch)
    with LLM(**WATCHED, tensor_parallel_size=2, ulysses_sequence_parallel_size=2) as llm:
        start = time.monotonic()
        with pytest.raises(
            RankFailedError, match=r"rank 2 has been in step 5 for .* rank 0 wai"
        ) as c:
            llm.generate(PROMPTS, PARAMS)
        assert time.monotonic() - start < KNOWN_S
        assert c.value.rank == 2


SCRIPT = """
import sys, time
from ostinato import LLM, SamplingParams
from ostinato.runner.model_runner import ModelRunner

llm = LLM("tiny", random_weights=True, device="cpu", max_model_len=128, show_progress=False,
          tensor_parallel_size=2, rank_timeout_s={timeout_s})
steps, run = [], ModelRunner.run

def hangs(runner, plan):
    steps.append(plan)
    if len(steps) == 7:
        sys.stdout.write(f"{{llm.engine.runner._world._dead_rank.__self__._processes[0].pid}}\\n")
        sys.stdout.flush()
        time.sleep(1000)
    return run(runner, plan)

ModelRunner.run = hangs
llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=12))
"""


def test_rank_0_that_hangs_in_a_step_ends_with_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(timeout_s=TIMEOUT_S))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pid, start = int(process.stdout.readline()), time.monotonic()
            _, said = process.communicate(timeout=20)
            # Rank 0 gives its main thread another second to come back.
            assert time.monotonic() - start < KNOWN_S + 1
        finally:
            process.kill()
    assert process.returncode == 1
    assert gone(pid)
    assert "this process exits because rank 0 has been in step 7 for" in said
    assert re.search(r"rank 0 has held up the others for .* here:(\n.*)*in hangs\n", said)


def comes_late() -> str:
    """All ranks run the script, and one is elsewhere in it."""
    with LLM(**WATCHED, tensor_parallel_size=2) as llm:
        llm.generate(PROMPTS, PARAMS)
        if dist.get_rank() == 1:
            world: Any = llm.engine.runner._world  # type: ignore[attr-defined]
            deadline = time.monotonic() + KNOWN_S
            while not world.failed and time.monotonic() < deadline:
                time.sleep(0.05)
        with pytest.raises(RankFailedError) as caught:
            llm.generate(PROMPTS, PARAMS)
        return str(caught.value)


def test_a_rank_that_is_elsewhere_in_the_script_is_named(gloo_pool: GlooPool) -> None:
    """It is told at once; by leaving, it frees rank 0, which would otherwise have ended."""
    try:
        results = dict(enumerate(gloo_pool.run(comes_late)))
    except WorkerDiedError as died:  # the machine is busy, and rank 1 was too late
        results = died.results
    assert 1 in results
    for said in results.values():
        assert re.match(r"rank 1 has not reached step \d+ for .* while rank 0 waits for it", said)
