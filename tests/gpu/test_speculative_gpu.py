"""Speculative decoding in half precision, through Triton's kernels and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, DraftModel, NgramDrafts, ReplayedDrafts, SamplingParams, SuffixDrafts
from ostinato.models.native.decoder import Decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[1, 2, 3, 1, 2], list(range(10, 75)), [7]]
PARAMS = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True)


def open_tiny(**settings: Any) -> LLM:
    return LLM(
        "tiny",
        random_weights=True,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_memory_bytes="64M",
        show_progress=False,
        **settings,
    )


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_right_drafts_are_accepted(num_tokens: int) -> None:
    """With a head of zeros the first token always wins, however the layers are rounded."""
    texts = [prompt + [0] * 100 for prompt in PROMPTS]
    with open_tiny(speculative=ReplayedDrafts(texts=texts, num_tokens=num_tokens)) as llm:
        model = llm.engine.model
        assert isinstance(model, Decoder)
        model.head_weight.data.zero_()
        assert tokens_of(llm) == [[0] * 61] * 3
        stats = llm.speculation
        assert stats.num_accepted == stats.num_drafts > 0
        assert llm.engine.runner.stats.misses <= 2  # prompts


@pytest.mark.parametrize(
    ("drafts", "least"),
    [
        (NgramDrafts(num_tokens=3), 1),
        (SuffixDrafts(num_tokens=3), 1.2),
        (DraftModel(model="tiny", random_weights=True, num_tokens=3), 2),
    ],
    ids=["ngram", "suffix", "model"],
)
def test_proposers_run_in_graphs(drafts: Any, least: float) -> None:
    """Another shape rounds differently, so not even a model agrees with itself every time."""
    with open_tiny(speculative=drafts) as llm:
        for _ in range(2):
            llm.speculation.reset()
            assert [len(output) for output in tokens_of(llm)] == [61] * 3
        assert llm.speculation.acceptance_length >= least
        assert llm.engine.runner.stats.misses <= 2  # prompts
