"""Sampler graphs on a real GPU: a real vocabulary, half precision, memory, and other streams.

What they do in general is tested in tests/runner and tests/engine, on CUDA as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, GraphConfig, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
VOCAB, NUM_TOKENS = 151_936, 24
SIZES = [1, 2, 4, 8, 16, 24, 32]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_p": 0.95, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"min_p": 0.05, "logit_bias": {7: 3.0, 11: -100.0}, "logprobs": 20},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("large-vocabulary")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def open_llm(path: Path, mode: str = "FULL_AND_PIECEWISE", dtype: str = "bfloat16") -> LLM:
    return LLM(
        path,
        device="cuda",
        dtype=dtype,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=256,
        kv_cache_memory_bytes="128M",
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else SIZES),
        show_progress=False,
    )


def requests(num_reqs: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Of different lengths, so that batches shrink through all sizes."""
    prompts = [[(i * 37 + j * 11) % VOCAB for j in range(4 + i % 9)] for i in range(num_reqs)]
    params = [
        SamplingParams(seed=i, max_tokens=NUM_TOKENS + 2 * i, **KINDS[i % len(KINDS)])
        for i in range(num_reqs)
    ]
    return prompts, params


def tokens_of(llm: LLM, num_reqs: int) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(*requests(num_reqs))]


@pytest.mark.parametrize("num_reqs", [1, 3, 5, 20, 31])
def test_tokens_are_those_of_eager(checkpoint: Path, num_reqs: int) -> None:
    """In float32, in which they do not depend on the batch's padding."""
    with open_llm(checkpoint, dtype="float32") as llm, open_llm(checkpoint, "NONE", "float32") as e:
        expected = tokens_of(e, num_reqs)
        for _ in range(2):  # captures, then replays alone
            assert tokens_of(llm, num_reqs) == expected
        if num_reqs > 2:
            assert llm.engine.runner.samplers.stats.replays > NUM_TOKENS


def test_replays_are_equal_to_launches_in_half_precision(checkpoint: Path) -> None:
    with open_llm(checkpoint) as llm:
        stats = llm.engine.runner.samplers.stats
        first = tokens_of(llm, 31)
        assert stats.captures > 3
        stats.reset()
        assert tokens_of(llm, 31) == first
        assert stats.captures == 0
        assert stats.replays > sum(stats.launches.values())


def test_memory_is_shared_by_all_sizes(checkpoint: Path) -> None:
    """Smallest first, the worst order: each takes a block, and all of them little more than
    twice the largest, which has two float32 numbers per logit."""
    params = SamplingParams(max_tokens=6, repetition_penalty=1.2, top_p=0.9, logprobs=5)
    with open_llm(checkpoint) as llm:
        samplers, taken = llm.engine.runner.samplers, []
        for size in SIZES:
            llm.generate([[1, 2, 3]] * size, params)
            taken.append(samplers.num_bytes)
        assert samplers.stats.captures == len(SIZES)
        assert taken[-1] <= 2.5 * 32 * (8 * VOCAB + 2**18)
        assert len(set(taken)) <= len(SIZES) - 1  # 24 and 32 share a block
        llm.generate([[1, 2, 3]] * 32, params)
        assert samplers.num_bytes == taken[-1]


def test_an_engine_that_changes_streams_at_every_step(checkpoint: Path) -> None:
    streams = [torch.cuda.current_stream(CUDA), *(torch.cuda.Stream(CUDA) for _ in range(2))]
    with open_llm(checkpoint) as llm:
        engine, expected = llm.engine, tokens_of(llm, 12)
        for _ in range(2):
            completions = [
                engine.prepare_request(*each)[0] for each in zip(*requests(12), strict=True)
            ]
            for completion in completions:
                engine.add(completion)
            step = 0
            while engine.has_unfinished:
                with torch.cuda.stream(streams[step % 3]):
                    engine.step()
                step += 1
            assert [each.output.token_ids for each in completions] == expected
