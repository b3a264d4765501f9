"""``update_weights`` on several ranks: each takes its part, of whichever form of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_llm import LIMITS, prompts
from replicas import save_llama, tokens_of
from tiny_models import TINY_GENERIC, TINY_MIXTURES, save_tiny
from transformers import AutoModelForCausalLM
from workers import GlooPool

from ostinato import LLM, GraphConfig, SamplingParams, compilation_counter
from ostinato.errors import ConfigError, ModelLoadError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=8, temperature=0)
Tokens = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def save_other(path: Path, like: Path) -> Path:
    """A checkpoint of the same config with other weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(like)
    for parameter in model.parameters():
        parameter.data *= 1 + 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def tokens_alone(path: Path) -> Tokens:
    with LLM(path, **LIMITS, graphs=GraphConfig(mode="NONE")) as llm:
        return tokens_of(llm.generate(prompts(), GREEDY))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Tokens]]:
    directory = tmp_path_factory.mktemp("llama")
    first = save_llama(directory / "first")
    paths = [first, save_other(directory / "second", first)]
    return paths, [tokens_alone(path) for path in paths]


def there_and_back(paths: list[str], options: dict[str, Any]) -> list[Tokens]:
    """Tokens with the first weights, after a refused update, with the second, and with the first.

    Prompts come together and alone, for models with another form for small batches.
    """
    found: list[Tokens] = []
    options = {**LIMITS, "graphs": GraphConfig(capture_sizes=[1, 2, 4, 12]), **options}
    with LLM(paths[0], **options, rank_timeout_s=20.0) as llm:

        def generate() -> None:
            together = tokens_of(llm.generate(prompts(), GREEDY))
            alone = [tokens_of(llm.generate([each], GREEDY))[0] for each in prompts()]
            assert together == alone
            found.append(together)

        generate()
        with compilation_counter.expect(num_cudagraph_captured=0):
            with pytest.raises(ModelLoadError, match="shape"):
                llm.update_weights({"model.norm.weight": torch.ones(3)})
            generate()
            model: Any = AutoModelForCausalLM.from_pretrained(paths[1])
            llm.update_weights(model.named_parameters())
            generate()
            llm.update_weights(paths[0])
            generate()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 2},
        {"tensor_parallel_size": 2, "swiftkv_layers": 1},
    ],
    ids=["tensor", "replicas", "shift", "swiftkv"],
)
def test_every_rank_runs_the_script(
    gloo_pool: GlooPool, llama: tuple[list[Path], list[Tokens]], options: dict[str, Any]
) -> None:
    paths, (first, second) = llama
    outcomes = gloo_pool.run(there_and_back, [str(path) for path in paths], options)
    for found in outcomes:
        assert found == outcomes[0]
        assert found[0] == found[1] == found[3] != found[2]
        if "swiftkv_layers" not in options:
            assert found[0] == first
            assert found[2] == second


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_the_model_starts(llama: tuple[list[Path], list[Tokens]]) -> None:
    paths, (first, second) = llama
    found = there_and_back([str(path) for path in paths], {"tensor_parallel_size": 2})
    assert found == [first, first, second, first]


def refused_or_not(path: str, options: dict[str, Any]) -> str:
    with LLM(path, **LIMITS, **options, graphs=GraphConfig(mode="NONE")) as llm:
        try:
            llm.update_weights(path)
        except ConfigError as error:
            return str(error)
    return ""


def test_experts_over_ranks_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    path = str(save_tiny(TINY_MIXTURES["qwen3_moe"](), tmp_path))
    both: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for error in gloo_pool.run(refused_or_not, path, both):
        assert "does not support enable_expert_parallel" in error
    assert gloo_pool.run(refused_or_not, path, {"tensor_parallel_size": 2}) == [""] * 2


def generic_replicas(paths: list[str]) -> list[Tokens]:
    found: list[Tokens] = []
    options: dict[str, Any] = {**LIMITS, "data_parallel_size": 2, "rank_timeout_s": 20.0}
    with LLM(paths[0], **options, graphs=GraphConfig(capture_sizes=[4])) as llm:
        for path in paths:
            llm.update_weights(path)
            found.append(tokens_of(llm.generate(prompts(), GREEDY)))
    return found


def test_replicas_of_transformers_modules(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first = save_tiny(TINY_GENERIC["gpt2"](), tmp_path / "first")
    paths = [first, save_other(tmp_path / "second", first)]
    expected = [tokens_alone(path) for path in paths]
    assert expected[0] != expected[1]
    assert gloo_pool.run(generic_replicas, [str(path) for path in paths]) == [expected] * 2
