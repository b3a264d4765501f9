"""Shadow replay on a GPU: bf16 and float32 agree to the bit, and planted faults are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.graphs.policy.modes import ModeName
from ostinato.self_test import self_test

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

PROMPTS = [[(31 * i + 7 * j) % 500 for j in range(3 + 29 * i)] for i in range(12)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=i % 3 / 2, top_k=5 * (i % 2), seed=i)
    for i in range(12)
]


def compared(model: str, mode: ModeName | None, **options: Any) -> LLM:
    return LLM(
        model,
        random_weights=True,
        device="cuda",
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=1024,
        kv_cache_tokens=16384,
        graphs=GraphConfig(mode=mode),
        verify="capture,sample:1",
        show_progress=False,
        **options,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", [None, "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("model", ["tiny", "llama-3.2-1b"])
def test_graphs_equal_eager_to_the_bit(model: str, mode: ModeName | None, dtype: str) -> None:
    with compared(model, mode, dtype=dtype) as llm:
        llm.generate(PROMPTS, PARAMS)
        report = llm.verification
        assert [str(each) for each in report.mismatches] == []
        assert (report.inexact, report.num_skipped) == ({}, 0)
        assert report.num_compared > 30


@pytest.mark.parametrize("drafts", ["ngram", "suffix"])
def test_steps_with_drafts_equal_eager(drafts: str) -> None:
    with compared("llama-3.2-1b", None, speculative=drafts) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert [str(each) for each in llm.verification.mismatches] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_planted_faults_are_named(dtype: str) -> None:
    results = self_test("cuda", dtype=dtype, modes=("FULL_AND_FULL", "PIECEWISE"))
    missed = [
        (each.fault, each.mode, [str(found) for found in each.mismatches])
        for each in results
        if not each.passed
    ]
    assert missed == []
