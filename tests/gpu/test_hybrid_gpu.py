"""Hybrid models on CUDA: captured decode steps, prompts beside them, memory, half precision."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hybrid import TINY_HYBRID, Reference, random_prompts
from tiny_models import save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.runner.step_result import SampledLogits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEW_TOKENS = 24
PROMPTS = random_prompts((1, 30, 3, 141, 64, 1, 17, 2, 100))
NAMES = ("lfm2", "qwen3_next", "falcon_h1_normed", "mamba2")
CONVOLUTIONS = ("lfm2",)


def open_llm(path: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 6,
        "max_num_batched_tokens": 128,
        "max_model_len": 192,
        "kv_cache_memory_bytes": "64M",
        "show_progress": False,
        "tune": "off",
    }
    return LLM(path, **{**options, **settings})


def generated(llm: LLM) -> list[list[int]]:
    """With NaN in all that earlier requests left."""
    memory = llm.engine.runner.memory
    assert memory.states is not None
    for layer in [*memory.states.layers, *memory.kv_cache.layers]:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(float("nan"))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """By default: with graphs, and a step ahead of the host."""
    path = save_tiny(TINY_HYBRID[name](), tmp_path)
    reference = Reference(path, torch.device("cuda"))
    expected = [reference.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for mode in (None, "FULL", "PIECEWISE", "NONE"):
        sizes = None if mode in (None, "NONE") else [1, 2, 4, 6, 32, 128]
        with open_llm(path, graphs=GraphConfig(mode=mode, capture_sizes=sizes)) as llm:
            assert generated(llm) == expected
            assert generated(llm) == expected
            resolved = llm.engine.resolved_mode.mode
            if mode is None and name not in CONVOLUTIONS:
                assert resolved is CUDAGraphMode.FULL_AND_PIECEWISE
            if sizes is not None:
                assert llm.engine.runner.stats.misses == 0


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str, tmp_path: Path) -> None:
    """Logits in bfloat16 are as near to those of float32 as transformers' are."""
    path = save_tiny(TINY_HYBRID[name](), tmp_path)
    exact = Reference(path, torch.device("cuda"))
    rounded = Reference(path, torch.device("cuda"), torch.bfloat16)
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        for request, row in zip(sampled.request_ids, sampled.logits.float(), strict=True):
            rows[request].append(row.clone())

    with open_llm(path, dtype="bfloat16") as llm:
        llm.engine.runner.on_logits = record
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        results = llm.generate(PROMPTS, params)
    ours, theirs = [], []
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = result.outputs[0].token_ids
        expected = exact.logits(prompt, tokens)
        ours.append((torch.stack(rows[f"{result.request_id}.0"]) - expected).abs().mean())
        theirs.append((rounded.logits(prompt, tokens) - expected).abs().mean())
    assert sum(ours) < 2 * sum(theirs)


def test_memory_is_measured(tmp_path: Path) -> None:
    """Without kv_cache_memory_bytes, states and activations are taken from what is free."""
    path = save_tiny(TINY_HYBRID["qwen3_next"](), tmp_path)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}
    with open_llm(path, max_num_batched_tokens=4096, max_num_seqs=64, **settings) as llm:
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.6 * total
        assert len(generated(llm)) == len(PROMPTS)
