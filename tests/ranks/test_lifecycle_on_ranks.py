"""Sleep, wake, and graphs dropped and captured again, on several ranks: all of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parallel_llm import LIMITS, prompts
from replicas import save_llama, tokens_of
from workers import GlooPool

from ostinato import (
    LLM,
    AsleepError,
    GraphConfig,
    ModelLoadError,
    SamplingParams,
    SleepError,
    compilation_counter,
)
from ostinato.runner.sleep.mapped_memory import MappedHostMemory

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=8, temperature=0)
Tokens = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokens]:
    path = save_llama(tmp_path_factory.mktemp("llama"))
    with LLM(path, **LIMITS, graphs=GraphConfig(mode="NONE")) as llm:
        return path, tokens_of(llm.generate(prompts(), GREEDY))


def life(path: str, options: dict[str, Any]) -> list[Tokens]:
    found: list[Tokens] = []
    graphs = GraphConfig(capture_sizes=[1, 2, 4, 12])
    options = {**LIMITS, "graphs": graphs, "enable_sleep_mode": True, **options}
    with LLM(path, **options, rank_timeout_s=20.0) as llm:

        def generate() -> None:
            found.append(tokens_of(llm.generate(prompts(), GREEDY)))

        generate()
        with compilation_counter.expect(num_cudagraph_captured=0):
            llm.sleep()
            with pytest.raises(AsleepError):
                generate()
            with pytest.raises(AsleepError):
                llm.update_weights(path)
            llm.wake()
            generate()
            llm.sleep(level=2)
            llm.wake()
            with pytest.raises(ModelLoadError, match="discarded the weights"):
                generate()
            llm.update_weights(path)
            generate()
        llm.clear_graphs()
        generate()
        before = compilation_counter.num_cudagraph_captured
        llm.capture_graphs()
        assert compilation_counter.num_cudagraph_captured > before
        generate()
    return found


def test_every_rank_runs_the_script(gloo_pool: GlooPool, llama: tuple[Path, Tokens]) -> None:
    """With two forms of the model, which share some of their weights' memory."""
    path, expected = llama
    options = {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 2}
    for found in gloo_pool.run(life, str(path), options):
        assert found == [expected] * 5


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["tensor", "replicas"]
)
def test_ranks_that_the_model_starts(llama: tuple[Path, Tokens], options: dict[str, Any]) -> None:
    path, expected = llama
    assert life(str(path), options) == [expected] * 5


def lazily(path: str, options: dict[str, Any]) -> list[Tokens]:
    """Tokens after each capture; with ranks that differ, a step would hang or be wrong."""
    graphs = GraphConfig(capture_sizes=[1, 2, 4, 12], lazy_capture=True)
    with LLM(path, **LIMITS, graphs=graphs, rank_timeout_s=20.0, **options) as llm:
        found = [tokens_of(llm.generate(prompts(), GREEDY))]
        before = compilation_counter.num_cudagraph_captured
        assert llm.capture_next()
        found.append(tokens_of(llm.generate(prompts(), GREEDY)))
        while llm.capture_next():
            pass
        assert compilation_counter.num_cudagraph_captured > before
        found.append(tokens_of(llm.generate(prompts(), GREEDY)))
    return found


def test_lazy_captures_on_every_rank(gloo_pool: GlooPool, llama: tuple[Path, Tokens]) -> None:
    path, expected = llama
    options = {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 2}
    for found in gloo_pool.run(lazily, str(path), options):
        assert found == [expected] * 3


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["tensor", "replicas"]
)
def test_lazy_captures_on_ranks_that_the_model_starts(
    llama: tuple[Path, Tokens], options: dict[str, Any]
) -> None:
    path, expected = llama
    assert lazily(str(path), options) == [expected] * 3


def no_room_on_the_second(path: str) -> list[Tokens]:
    found: list[Tokens] = []
    options: dict[str, Any] = {**LIMITS, "tensor_parallel_size": 2, "rank_timeout_s": 20.0}
    with LLM(path, enable_sleep_mode=True, **options) as llm:
        llm.sleep(level=2)
        is_second = llm.engine.runner._world.rank == 1  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            if is_second:
                patch.setattr(MappedHostMemory, "map", _fail)
            with pytest.raises(SleepError, match="cannot wake: another rank has no room"):
                llm.wake()
        assert llm.sleep_level == 2
        llm.wake()
        llm.update_weights(path)
        found.append(tokens_of(llm.generate(prompts(), GREEDY)))
    return found


def _fail(_: object) -> None:
    raise MemoryError("no memory")


def test_one_rank_without_room_keeps_all_asleep(
    gloo_pool: GlooPool, llama: tuple[Path, Tokens]
) -> None:
    path, expected = llama
    assert gloo_pool.run(no_room_on_the_second, str(path)) == [[expected]] * 2
