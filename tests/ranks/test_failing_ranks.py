"""A rank that ``LLM`` started dies, hangs or raises: rank 0 says which, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from test_parallel_faults import TWO, in_rank_1
from test_parallel_start import PARAMS, PROMPTS, TIMEOUT_S, TINY, gone, pid_of_rank_1

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError, RankFailedError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(**TWO) as llm:
        yield llm


def test_a_rank_that_dies_takes_the_others_down(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=100))
    for _ in range(5):
        next(stream)
    os.kill(pid_of_rank_1(llm), signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 1 was killed by signal 9") as caught:
        list(stream)
    assert caught.value.rank == 1
    with pytest.raises(RankFailedError, match="rank 1 was killed by signal 9"):
        llm.generate(PROMPTS)


@pytest.mark.alone  # it is timed
def test_a_rank_that_hangs_is_ended(llm: LLM) -> None:
    pid = pid_of_rank_1(llm)
    next(llm.stream(PROMPTS, SamplingParams(max_tokens=50)))
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 stopped beating"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=50))
    # The timeout plus a tenth, and three seconds for a busy machine.
    assert time.monotonic() - start < 1.1 * TIMEOUT_S + 3
    llm.close()
    assert gone(pid)


FAULTY_STEP = """
    from ostinato.runner.request_state import RequestState
    steps, update = [], RequestState.update
    def fails(self, plan):
        steps.append(plan)
        if len(steps) == 4:
            raise ValueError("a fault of this rank")
        update(self, plan)
    RequestState.update = fails
"""


def test_an_error_in_a_started_rank_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_rank_1(FAULTY_STEP, tmp_path, monkeypatch)
    with LLM(**TWO) as llm:
        with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: a fault of this"):
            llm.generate(PROMPTS, PARAMS)
        with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: a fault of this"):
            llm.generate(PROMPTS, PARAMS)
    assert 'ValueError("a fault of this rank")' in capfd.readouterr().err  # with its traceback


DIES = """
    import torch.distributed as dist
    def dies(*args, **options):
        os._exit(3)
    dist.init_process_group = dies
"""


def test_a_rank_that_dies_before_it_connects_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    with monkeypatch.context() as faulty:
        in_rank_1(DIES, tmp_path, faulty)
        with pytest.raises(RankFailedError, match="the process of rank 1 ended with exit code 3"):
            LLM(**TWO)
    assert time.monotonic() - start < 60  # it was 300
    with LLM(**TINY, tensor_parallel_size=2) as llm:
        assert llm.generate([[1, 2, 3]])


def test_a_model_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="4 query heads cannot be divided evenly among sp=1 x tp=3"
    ):
        LLM(**TINY, tensor_parallel_size=3, rank_timeout_s=TIMEOUT_S)
    assert not dist.is_initialized()
