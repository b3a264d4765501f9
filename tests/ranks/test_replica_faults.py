"""A replica that dies, while a request of another one runs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from test_parallel_start import TINY, gone

from ostinato import LLM, SamplingParams
from ostinato.errors import RankFailedError


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("lockstep", "drafts"), [(False, None), (True, None), (True, "ngram")])
def test_a_replica_that_dies_is_named(
    monkeypatch: pytest.MonkeyPatch, lockstep: bool, drafts: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options: dict[str, Any] = {"data_parallel_lockstep": lockstep, "speculative": drafts}
    options |= {"data_parallel_size": 2, "rank_timeout_s": 4.0}
    prompts = [[1, 2, 3]] if lockstep else [[1, 2, 3], [4, 5, 6]]  # one leaves rank 1 idle
    with LLM(**TINY, **options) as llm:
        ranks: Any = llm.engine.runner._world._dead_rank.__self__  # type: ignore[attr-defined]
        stream = llm.stream(prompts, SamplingParams(max_tokens=100))
        for _ in range(5):
            next(stream)
        pid = ranks._processes[0].pid
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 was killed by signal 9") as caught:
            list(stream)
        assert caught.value.rank == 1
        with pytest.raises(RankFailedError, match="rank 1 was killed by signal 9"):
            llm.generate(prompts)
    assert time.monotonic() - start < 30
    assert gone(pid)
