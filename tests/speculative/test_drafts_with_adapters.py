"""Drafts of requests with LoRA adapters: each of a request's tokens runs with its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapters import Merged, save_adapter
from tiny_models import TINY_NATIVE, save_tiny

from ostinato import LLM, DraftModel, GraphConfig, ReplayedDrafts, SamplingParams, Speculation

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
PROMPTS = [[1, 2, 3, 1, 2], list(range(10, 45)), [7], [3, 1, 2], [50, 40, 50, 40]]
WANTED = ["one", None, "two", "two", "one"]
NUM_NEW = 15
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


class Made(NamedTuple):
    """A checkpoint, its adapters, and the tokens of transformers for ``PROMPTS``."""

    model: Path
    adapters: dict[str, Path]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("adapters")
    model = save_tiny(TINY_NATIVE["llama"](), directory / "model")
    adapters = {
        name: save_adapter(directory / name, model, seed=seed, rank=4 + seed)
        for seed, name in enumerate(["one", "two"])
    }
    merged = {name: Merged(model, path) for name, path in adapters.items()}
    models = {None: Merged(model), **merged}
    pairs = zip(PROMPTS, WANTED, strict=True)
    return Made(model, adapters, [models[name].tokens(prompt, NUM_NEW) for prompt, name in pairs])


def open_llm(made: Made, device: torch.device, drafts: Speculation, **settings: Any) -> LLM:
    llm = LLM(
        str(made.model),
        device=str(device),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=96,
        kv_cache_memory_bytes="4M",
        enable_lora=True,
        max_loras=2,
        show_progress=False,
        speculative=drafts,
        **settings,
    )
    for name, path in made.adapters.items():
        llm.load_adapter(name, path)
    return llm


def tokens_of(llm: LLM) -> list[list[int]]:
    results = llm.generate(PROMPTS, GREEDY, adapter=WANTED)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_merged_weights(device: torch.device, made: Made, mode: str) -> None:
    texts = [prompt + output for prompt, output in zip(PROMPTS, made.expected, strict=True)]
    drafts = ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.7)
    graphs = GraphConfig(mode=mode, capture_sizes=[4, 16, 32])
    with open_llm(made, device, drafts, graphs=graphs) as llm:
        for _ in range(2):
            assert tokens_of(llm) == made.expected
        assert llm.speculation.acceptance_length > 2


@pytest.mark.slow
def test_a_draft_model_has_no_adapters(device: torch.device, made: Made) -> None:
    """Its drafts are those of the model alone, right only for requests without an adapter."""
    drafts = DraftModel(model=str(made.model), num_tokens=3)
    with open_llm(made, device, drafts) as llm:
        assert tokens_of(llm) == made.expected
        llm.speculation.reset()
        llm.generate([PROMPTS[1]], GREEDY)
        assert llm.speculation.acceptance_rate == 1
