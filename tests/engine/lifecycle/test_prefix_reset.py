"""``reset_prefix_cache``: later prompts are computed anew, and requests that run notice nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato import LLM, ClosedError, ConcurrentUseError, GraphConfig, SamplingParams

LONG = list(range(3, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def open_tiny(device: torch.device, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "random_weights": True,
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 128,
        "kv_cache_memory_bytes": "16M",
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[4]),
    }
    return LLM("tiny", device=str(device), **{**options, **settings})


@pytest.fixture(params=[False, True], ids=["in-step", "overlap"])
def llm(device: torch.device, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_tiny(device, async_scheduling=request.param) as llm:
        yield llm


def test_prefixes_are_forgotten(llm: LLM) -> None:
    (first,) = llm.generate([LONG], GREEDY)
    (again,) = llm.generate([LONG], GREEDY)
    llm.reset_prefix_cache()
    (anew,) = llm.generate([LONG], GREEDY)
    (found,) = llm.generate([LONG], GREEDY)
    cached = [each.num_cached_tokens for each in (first, again, anew, found)]
    assert cached == [0, 48, 0, 48]
    assert all(each.outputs[0].token_ids == first.outputs[0].token_ids for each in (again, anew))
    allocator = llm.engine.scheduler.allocator
    assert allocator.num_free_blocks == allocator.num_blocks - 1


def test_running_requests_go_on(llm: LLM) -> None:
    prompts = [LONG, LONG[:20], [7]]
    expected = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]
    for steps in range(1, 24, 3):  # among prompts, in the steady state, at the ends of blocks
        found: list[list[int]] = [[] for _ in prompts]
        for number, delta in enumerate(llm.stream(prompts, GREEDY)):
            found[delta.prompt_index] += delta.token_ids
            if number == steps:
                llm.reset_prefix_cache()
                llm.reset_prefix_cache()
        assert found == expected
    allocator = llm.engine.scheduler.allocator
    assert allocator.num_free_blocks == allocator.num_blocks - 1


def test_without_a_prefix_cache_there_is_nothing_to_forget(device: torch.device) -> None:
    with open_tiny(device, enable_prefix_caching=False, graphs=GraphConfig(mode="NONE")) as llm:
        llm.reset_prefix_cache()
        assert llm.generate([LONG], GREEDY)[0].num_cached_tokens == 0
    with pytest.raises(ClosedError, match="closed"):
        llm.reset_prefix_cache()


def test_another_thread_is_refused(llm: LLM) -> None:
    errors: list[BaseException] = []

    def reset() -> None:
        try:
            llm.reset_prefix_cache()
        except ConcurrentUseError as error:
            errors.append(error)

    stream = llm.stream([LONG], GREEDY)
    next(stream)
    thread = threading.Thread(target=reset)
    thread.start()
    thread.join()
    stream.close()
    assert "LLM.reset_prefix_cache" in str(errors[0])
