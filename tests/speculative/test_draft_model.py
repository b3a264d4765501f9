"""Drafts of a second model: one that agrees with the first, and one that does not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_hybrid import TINY_HYBRID
from tiny_models import TINY_NATIVE, save_tiny
from tiny_vision import save_vision_model
from workers import GlooPool

from ostinato import LLM, ConfigError, DraftModel, GraphConfig, SamplingParams
from ostinato.scheduling.draft_steps import SpeculationStats
from ostinato.speculative.draft_model import DraftModelProposer

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
PROMPTS = [[1, 2, 3, 1, 2], list(range(10, 75)), [7], [50, 40, 50, 40, 50, 40]]
NUM_NEW = 21
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=NUM_NEW, seed=5, ignore_eos=True)
    for temperature in (0, 0.8, 1.2, 0)
]


def open_llm(model: Path | str, device: torch.device | str = "cpu", **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32",
        "random_weights": model == "tiny",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,  # prompts take several steps
        "max_model_len": 96,
        "kv_cache_memory_bytes": "4M",
        "show_progress": False,
    }
    return LLM(str(model), device=str(device), **{**options, **settings})


def tokens_of(llm: LLM, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def same_model(**options: Any) -> DraftModel:
    """The model itself: all its drafts are right, if it sees all that the model sees."""
    return DraftModel(model="tiny", random_weights=True, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "overlap"), [*((mode, True) for mode in MODES), ("FULL_AND_FULL", False)]
)
def test_a_model_agrees_with_itself(device: torch.device, mode: str, overlap: bool) -> None:
    """Random requests too: both models sample with the same noise."""
    with open_llm("tiny", device) as llm:
        expected = tokens_of(llm)
    with open_llm(
        "tiny",
        device,
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 32]),
        async_scheduling=overlap,
        speculative=same_model(num_tokens=3),
    ) as llm:
        for _ in range(2):  # the second time, with cached prefixes
            assert tokens_of(llm) == expected
        assert llm.speculation.num_drafts > 100
        assert llm.speculation.acceptance_rate == 1


def on_replicas() -> tuple[list[list[int]], SpeculationStats]:
    graphs = GraphConfig(capture_sizes=[1, 2, 4, 8, 32])
    options: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_lockstep": True}
    with open_llm("tiny", **options, graphs=graphs, speculative=same_model(num_tokens=3)) as llm:
        return tokens_of(llm), llm.speculation


@pytest.mark.slow
def test_every_replica_has_one(gloo_pool: GlooPool) -> None:
    with open_llm("tiny") as llm:
        expected = tokens_of(llm)
    (tokens, stats), (others, _) = gloo_pool.run(on_replicas)
    assert tokens == others == expected
    assert stats.num_drafts > 50
    assert stats.acceptance_rate == 1


@pytest.mark.slow
def test_it_reads_tokens_of_steps_without_drafts() -> None:
    """Four requests have no drafts; the one that stays longest has, and they are right."""
    drafts = same_model(num_tokens={1: 3, 4: 0})
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 30, 9, 9)
    ]
    with open_llm("tiny") as llm:
        expected = tokens_of(llm, params=params)
    with open_llm("tiny", speculative=drafts) as llm:
        assert tokens_of(llm, params=params) == expected
        assert llm.speculation.num_drafts > 10
        assert llm.speculation.acceptance_rate == 1


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [40, 600], ids=["fewer tokens", "more tokens"])
def test_another_model_changes_nothing(tmp_path: Path, vocab_size: int) -> None:
    """Against transformers. Its vocabulary need not have the same size."""
    target = save_tiny(TINY_NATIVE["llama"](), tmp_path / "target")
    small = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=128,
    )
    drafts = DraftModel(model=str(save_tiny(small, tmp_path / "small")), num_tokens=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
        expected.append(output[0, len(prompt) :].tolist())
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with open_llm(target, speculative=drafts) as llm:
        assert tokens_of(llm, params=params) == expected
        assert llm.speculation.num_runs > 0


@pytest.mark.slow
def test_its_cache_is_part_of_the_budget() -> None:
    sizes = {}
    for name, drafts in (("plain", None), ("with", same_model())):
        limits: dict[str, Any] = {"kv_cache_memory_bytes": "300K", "max_num_seqs": 32}
        with open_llm("tiny", speculative=drafts, **limits) as llm:
            sizes[name] = llm.engine.runner.cache.num_blocks
    assert sizes["with"] == sizes["plain"] // 2


def test_closing_drops_it() -> None:
    with open_llm("tiny", speculative=same_model()) as llm:
        proposer = llm.engine.runner.memory.proposer
        assert isinstance(proposer, DraftModelProposer)
        model = weakref.ref(proposer._model)
        assert model() is not None
    gc.collect()
    assert model() is None


def test_models_that_cannot_draft(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DraftModel needs the name of a model, got ''"):
        DraftModel(num_tokens=2)
    short = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=32,
    )
    drafts = DraftModel(model=str(save_tiny(short, tmp_path / "short")))
    with pytest.raises(ConfigError, match="supports 1 to 32"):
        open_llm("tiny", speculative=drafts)
    recurrent = DraftModel(model=str(save_tiny(TINY_HYBRID["lfm2"](), tmp_path / "recurrent")))
    with pytest.raises(ConfigError, match="a draft model cannot have recurrent layers"):
        open_llm("tiny", speculative=recurrent)
    save_vision_model(tmp_path / "images", "qwen2_vl")
    with pytest.raises(ConfigError, match="a draft model cannot be one that takes images"):
        open_llm("tiny", speculative=DraftModel(model=str(tmp_path / "images")))
