"""``lazy_capture``: nothing is captured at start-up, and later what is used most, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_encoders import save_encoder

from ostinato import (
    LLM,
    AsyncLLM,
    CaptureError,
    ConfigError,
    GraphConfig,
    RequestError,
    SamplingParams,
)
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import Reason

SIZES = [1, 2, 4, 8, 32]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[1 + number, 2, 3] for number in range(4)]
OPTIONS: dict[str, Any] = {
    "random_weights": True,
    "show_progress": False,
    "kv_cache_memory_bytes": "4M",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}


def open_lazy(device: torch.device, **options: Any) -> LLM:
    graphs = GraphConfig(capture_sizes=SIZES, lazy_capture=True)
    return LLM("tiny", device=str(device), graphs=graphs, **OPTIONS | options)


def captured(llm: LLM) -> list[tuple[bool, int]]:
    """Of each graph, in order of capture: whether it decodes, and its size."""
    entries = llm.engine.runner.capture_report.entries
    return [
        (each.entry.descriptor.uniform, each.entry.descriptor.num_tokens)
        for each in entries
        if each.error is None
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def lazy(device: torch.device) -> Iterator[LLM]:
    with open_lazy(device) as llm:
        yield llm


def test_what_is_used_most_comes_first_and_tokens_stay_the_same(
    lazy: LLM, device: torch.device
) -> None:
    eager = GraphConfig(mode="NONE")
    with LLM("tiny", device=str(device), graphs=eager, **OPTIONS) as llm:
        expected = tokens_of(llm)
    assert tokens_of(lazy) == expected
    stats = lazy.engine.runner.stats
    assert captured(lazy) == []
    assert stats.hits == 0
    assert set(stats.eager) == {Reason.NOT_CAPTURED}
    assert lazy.capture_next()  # the decode steps of four requests
    assert captured(lazy) == [(True, 4)]
    assert tokens_of(lazy) == expected
    assert stats.hits > 0
    num_planned = len(lazy.engine.runner.plan.entries)
    for number in range(2, num_planned + 1):
        assert lazy.capture_next()
        assert len(captured(lazy)) == number
        assert tokens_of(lazy) == expected
    assert captured(lazy)[1] == (False, 32)  # the prompts; of sizes never used, decode first
    assert [uniform for uniform, _ in captured(lazy)[2:]] == [True] * 3 + [False] * 4
    assert not lazy.capture_next()
    stats.reset()
    assert tokens_of(lazy) == expected
    assert not stats.eager


def test_memory_is_as_estimated_and_adds_up(lazy: LLM, device: torch.device) -> None:
    assert lazy.graph_memory.taken.total == 0
    while lazy.capture_next():
        pass
    memory, runner = lazy.graph_memory, lazy.engine.runner
    assert memory.is_within_estimate
    assert memory.taken.pool == runner.pool.num_bytes
    assert memory.taken.executable == sum(e.executable_bytes for e in runner.capture_report.entries)


def test_explicit_captures_and_clearing(lazy: LLM) -> None:
    assert lazy.engine.lifecycle.captures_when_idle
    lazy.capture_next()
    lazy.capture_graphs()
    assert_all_are_counted(lazy)
    assert not lazy.capture_next()
    lazy.clear_graphs()
    assert captured(lazy) == [] == lazy.report().graphs
    assert not lazy.engine.lifecycle.captures_when_idle  # they were dropped on purpose
    assert lazy.graph_memory.taken.total == 0
    expected = tokens_of(lazy)
    assert lazy.capture_next()  # asked for
    lazy.capture_graphs()
    assert_all_are_counted(lazy)
    assert tokens_of(lazy) == expected


def assert_all_are_counted(lazy: LLM) -> None:
    """The graphs of several captures, each once, in reports and in the memory they took."""
    entries = lazy.engine.runner.capture_report.entries
    assert len(captured(lazy)) == len(set(captured(lazy))) == len(lazy.engine.runner.plan.entries)
    assert lazy.graph_memory.taken.executable == sum(each.executable_bytes for each in entries)
    assert lazy.engine.runner.capture_bytes == lazy.graph_memory.taken.total


def test_not_while_a_request_is_unfinished(lazy: LLM) -> None:
    stream = lazy.stream(PROMPTS, GREEDY)
    first = next(stream)
    with pytest.raises(RequestError, match="a capture uses their buffers"):
        lazy.capture_next()
    rest = list(stream)
    assert len([delta for delta in (first, *rest) if delta.prompt_index == 0]) >= 1
    assert lazy.capture_next()


def test_a_graph_that_cannot_be_captured_leaves_the_others(
    lazy: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(lazy)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise CaptureError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(GraphPool, "capture", fail)
        with caplog.at_level(logging.WARNING):
            assert lazy.capture_next()
    assert "no luck; its batches go on to run eagerly" in caplog.text
    assert captured(lazy) == []
    while lazy.capture_next():
        pass
    assert len(captured(lazy)) == len(lazy.engine.runner.plan.entries) - 1
    assert (True, 4) not in captured(lazy)
    lazy.engine.runner.stats.reset()
    assert tokens_of(lazy) == expected
    # Its batches run the mixed graph of that size.
    assert not any(key.uniform for key in lazy.engine.runner.stats.replays)


@pytest.mark.slow
def test_verified_as_they_come(device: torch.device) -> None:
    with open_lazy(device, verify="capture") as llm:
        compared = []
        while llm.capture_next():
            compared.append(llm.engine.runner.verification.num_compared)
        assert compared == sorted(set(compared))  # each graph once, when it comes


async def settled(served: AsyncLLM) -> int:
    """How many graphs there are once there is nothing left to capture."""
    limit = time.monotonic() + 60
    while await served.call(lambda llm: llm.engine.lifecycle.captures_when_idle):
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)
    return await served.call(lambda llm: len(captured(llm)))


def test_a_server_captures_while_it_has_nothing_else_to_do(device: torch.device) -> None:
    async def use(served: AsyncLLM) -> tuple[list[list[int]], int, list[list[int]]]:
        async def one(prompt: list[int]) -> list[int]:
            outputs = await served.generate(prompt, GREEDY)
            return outputs.outputs[0].token_ids

        first = await asyncio.gather(*map(one, PROMPTS))
        num_graphs = await settled(served)
        return first, num_graphs, await asyncio.gather(*map(one, PROMPTS))

    graphs = GraphConfig(capture_sizes=SIZES, lazy_capture=True)
    with AsyncLLM("tiny", device=str(device), graphs=graphs, **OPTIONS) as served:
        first, num_graphs, second = asyncio.run(use(served))
    assert num_graphs == 5 + 4  # mixed sizes, and those that decode batches can have
    assert first == second
    with open_lazy(device) as llm:
        assert first == tokens_of(llm)


def test_where_it_does_not_work(tmp_path: Any) -> None:
    graphs = GraphConfig(lazy_capture=True)
    with pytest.raises(ConfigError, match="lazy_capture does not work with data_parallel_lockstep"):
        LLM("tiny", data_parallel_size=2, data_parallel_lockstep=True, graphs=graphs, **OPTIONS)
    path = tmp_path / "bert"
    save_encoder(path)
    with pytest.raises(ConfigError, match="lazy_capture is for models that generate"):
        LLM(path, graphs=graphs)
    with pytest.raises(ConfigError, match="graph_memory 1,024 is for models that generate"):
        LLM(path, graph_memory=1024)
