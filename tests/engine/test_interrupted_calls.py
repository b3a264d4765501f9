"""Calls of an ``LLM`` that are interrupted anywhere leave their thread as they found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupts import check_interrupts
from tiny_models import TINY_GENERIC, TINY_NATIVE, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams

PROMPTS = [[1, 2, 3], list(range(10, 45))]
GREEDY = SamplingParams(temperature=0, max_tokens=5)
SAMPLED = SamplingParams(temperature=0.7, top_k=3, max_tokens=5, seed=1, logprobs=2)


def open_llm(path: str) -> LLM:
    return LLM(
        path,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        show_progress=False,
        graphs=GraphConfig(capture_sizes=[1, 4]),
    )


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {**TINY_NATIVE, **TINY_GENERIC}[request.param]()
    return str(save_tiny(config, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llm(path: str) -> Iterator[LLM]:
    with open_llm(path) as llm:
        yield llm


def generated(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def streamed(llm: LLM) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for delta in llm.stream(PROMPTS, GREEDY):
        tokens[delta.prompt_index].extend(delta.token_ids)
    return tokens


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": generated,
    "sampled": lambda llm: generated(llm, SAMPLED),
    "stream": streamed,
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted(llm: LLM, call: str) -> None:
    expected = {name: each(llm) for name, each in CALLS.items()}
    assert check_interrupts(lambda: CALLS[call](llm), range(0, 100_000, 5)) > 50
    assert {name: each(llm) for name, each in CALLS.items()} == expected


@pytest.mark.slow
def test_a_start_that_is_interrupted(tmp_path: Path) -> None:
    """Of some 31,000 functions, every 1,009th: loading, warm-ups, captures, closing.

    Of a native model: transformers patches its own classes while it builds one, and an interrupt
    can leave them so.
    """
    path = str(save_tiny(TINY_NATIVE["llama"](), tmp_path))

    def start() -> None:
        with open_llm(path):
            pass

    start()
    assert check_interrupts(start, range(0, 10_000_000, 1009)) > 20
    start()
