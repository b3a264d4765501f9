"""One engine, a run of it, and its report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.report.records import RunReport

SIZES = [1, 2, 4, 8]


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM(
        "tiny",
        random_weights=True,
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=96,
        kv_cache_memory_bytes="4M",
        graphs=GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=SIZES),
        show_progress=False,
    ) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
        llm.generate([[1, 2, 3]] * 3, params)  # 9 tokens of prompts: more than any size
        llm.generate([[5, 6]], params)
        yield llm


@pytest.fixture(scope="package")
def report(llm: LLM) -> RunReport:
    return llm.report()
