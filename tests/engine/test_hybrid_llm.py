"""Models with recurrent layers in service: states that leak, go stale or are lost would show.

Every result is compared with transformers' for the same prompt alone. Before each call all states
are NaN, those of padding included, and so are the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hybrid import TINY_HYBRID, Reference, random_prompts
from tiny_models import save_tiny

from ostinato import LLM, GraphConfig, SamplingParams

CPU = torch.device("cpu")
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = random_prompts((1, 30, 3, 70, 9, 1, 17))
NAMES = ["lfm2", "qwen3_next", "bamba", "mamba2"]
MODES = ["NONE", "FULL_AND_PIECEWISE"]


def overlaps(name: str, *, number: int) -> list[bool]:
    """Whether steps overlap: both for one family, and alternating for the others.

    A layer cannot see it: models and recurrent layers import nothing that schedules.
    """
    return [False, True] if name == "qwen3_next" else [number % 2 == 0]


BY_FAMILY = [
    pytest.param(name, overlap, id=f"{name}-{'overlap' if overlap else 'in-step'}")
    for number, name in enumerate(NAMES)
    for overlap in overlaps(name, number=number)
]
BY_MODE = [
    pytest.param(name, mode, overlap, id=f"{name}-{mode}-{'overlap' if overlap else 'in-step'}")
    for number, name in enumerate(NAMES)
    for nth, mode in enumerate(MODES)
    for overlap in overlaps(name, number=number + nth)
]


class Checkpoint:
    """A tiny model on disk, and what transformers answers."""

    def __init__(self, name: str, directory: Path) -> None:
        self.path = save_tiny(TINY_HYBRID[name](), directory)
        reference = Reference(self.path, CPU)
        self.expected = [reference.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(name: str) -> Checkpoint:
        if name not in made:
            made[name] = Checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def open_llm(path: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_model_len": 96,
        "kv_cache_memory_bytes": "16M",
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[2, 3, 24]),
    }
    return LLM(path, **{**options, **settings})


def poison(llm: LLM) -> None:
    """Fill everything that requests leave behind."""
    memory = llm.engine.runner.memory
    assert memory.states is not None
    for layer in [*memory.states.layers, *memory.kv_cache.layers]:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(float("nan"))


def generated(llm: LLM) -> list[list[int]]:
    poison(llm)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "overlap"), BY_MODE)
def test_rows_are_reused(
    name: str, mode: str, overlap: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Seven requests share three rows; then one runs alone, and is padded."""
    made = checkpoint(name)
    graphs = GraphConfig(mode=mode, capture_sizes=[2, 3, 24])
    with open_llm(made.path, graphs=graphs, async_scheduling=overlap) as llm:
        assert generated(llm) == made.expected
        alone = llm.generate([PROMPTS[1]], GREEDY)
        assert alone[0].outputs[0].token_ids == made.expected[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overlap"), BY_FAMILY)
def test_preempted_requests_start_again(
    name: str, overlap: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    made = checkpoint(name)
    with open_llm(made.path, async_scheduling=overlap, block_size=2) as llm:
        scheduler = llm.engine.scheduler
        allocator = scheduler.allocator
        # As many blocks as the longest of these requests needs.
        short = [index for index, prompt in enumerate(PROMPTS) if len(prompt) <= 30]
        allocator.allocate(allocator.num_free_blocks - 20)
        preempted = []
        schedule = scheduler.schedule

        def counted() -> Any:
            plan = schedule()
            preempted.extend(plan.preempted)
            return plan

        scheduler.schedule = counted  # type: ignore[method-assign]
        poison(llm)
        results = llm.generate([PROMPTS[index] for index in short], GREEDY)
        tokens = [result.outputs[0].token_ids for result in results]
        assert tokens == [made.expected[index] for index in short]
    assert len(preempted) > 1
    assert any(request.num_tokens > len(request.prompt_token_ids) for request in preempted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overlap"), BY_FAMILY)
def test_aborted_requests_leave_nothing_behind(
    name: str, overlap: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Some are aborted in their prompts, some while they decode; others take their rows."""
    made = checkpoint(name)
    with open_llm(made.path, async_scheduling=overlap) as llm:
        engine = llm.engine
        poison(llm)
        completions = [engine.prepare_request(prompt, GREEDY)[0] for prompt in PROMPTS]
        for completion in completions:
            engine.add(completion)
        num_steps, aborted = 0, set[int]()
        while engine.has_unfinished:
            engine.step()
            num_steps += 1
            rows = [completion.request.req_index for completion in completions]
            running = [index for index, row in enumerate(rows) if row is not None]
            if num_steps % 4 == 0 and len(aborted) < 3 and running:
                engine.abort(completions[running[0]])
                aborted.add(running[0])
        assert len(aborted) == 3
        for index, completion in enumerate(completions):
            tokens, expected = completion.request.output_token_ids, made.expected[index]
            assert tokens == (expected[: len(tokens)] if index in aborted else expected)


@pytest.mark.slow
def test_two_engines_at_once(checkpoint: Callable[[str], Checkpoint]) -> None:
    """Of the same model, and of another: states belong to an engine."""
    names = ("lfm2", "qwen3_next", "qwen3_next")
    made = [checkpoint(name) for name in names]
    llms = [open_llm(each.path) for each in made]
    try:
        with ThreadPoolExecutor(len(llms)) as pool:
            results = list(pool.map(generated, llms))
        assert results == [each.expected for each in made]
    finally:
        for llm in llms:
            llm.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_replicas_in_lockstep(checkpoint: Callable[[str], Checkpoint]) -> None:
    """A replica that has ended its requests runs padding."""
    made = checkpoint("qwen3_next")
    with open_llm(made.path, data_parallel_size=2, data_parallel_lockstep=True) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        assert [result.outputs[0].token_ids for result in results] == made.expected


@pytest.mark.slow
def test_states_count_as_kv_cache(checkpoint: Callable[[str], Checkpoint]) -> None:
    budget = 2**20
    with open_llm(checkpoint("qwen3_next").path, kv_cache_memory_bytes=budget) as llm:
        memory = llm.engine.runner.memory
        assert memory.states is not None
        tensors = [tensor for layer in memory.states.layers for tensor in layer]
        assert {len(tensor) for tensor in tensors} == {3 + 1}  # rows, and one for padding
        states = sum(tensor.nbytes for tensor in tensors)
        # Less than another block is left.
        assert states + memory.kv_cache.num_bytes <= budget
        assert llm.engine.runner.cache.num_blocks == min(
            (budget - states) // (memory.kv_cache.num_bytes // llm.engine.runner.cache.num_blocks),
            3 * 6 + 1,  # as many as the requests can use
        )
