"""Decoding in bfloat16 through our kernels, against transformers; caches are equal to the bit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.runner.step_result import SampledLogits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEW_TOKENS = 48
# Rounding: 8 bits of mantissa, a few layers. Logits closer than this are the same to both.
TOLERANCE = 2e-2
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=128),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=24),
}
# Row classes of the small-batch products: one, up to 16, up to 32, up to 64, and beyond.
BATCHES = [1, 5, 20, 40, 70]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.02)  # as models of this kind start
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        path = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16).save_pretrained(path)
        made[name] = path, model.to("cuda").eval()
    return made


def prompts_for(batch: int) -> list[list[int]]:
    return [[(i * 37 + j * 11 + 5) % 1000 for j in range(3 + i % 29)] for i in range(batch)]


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(
        path,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=80,
        max_num_batched_tokens=2048,
        max_model_len=256,
        kv_cache_memory_bytes="256M",
        show_progress=False,
        **settings,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_transformers_up_to_near_ties(
    name: str, checkpoints: dict[str, tuple[Path, Any]]
) -> None:
    path, theirs = checkpoints[name]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    with open_llm(path) as llm:
        for batch in BATCHES:
            prompts = prompts_for(batch)
            for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
                tokens = result.outputs[0].token_ids
                ids = torch.tensor([prompt + tokens], device="cuda")
                with torch.no_grad():
                    logits = theirs(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                ours = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
                best = logits.amax(dim=1)
                assert ((best - ours) <= TOLERANCE * logits.abs().amax(dim=1)).all()
        assert llm.engine.runner.stats.hits > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, checkpoints: dict[str, tuple[Path, Any]]
) -> None:
    path, theirs = checkpoints[name]
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        for request, row in zip(sampled.request_ids, sampled.logits.float(), strict=True):
            rows[request].append(row)

    with open_llm(path) as llm:
        llm.engine.runner.on_logits = record
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
        for batch in BATCHES:
            rows.clear()
            prompts = [[(i * 37 + j * 11 + 5) % 1000 for j in range(9)] for i in range(batch)]
            outputs = llm.generate(prompts, params)
            ours = torch.stack([torch.stack(rows[f"{output.request_id}.0"]) for output in outputs])
            ids = torch.tensor(
                [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)],
                device="cuda",
            )
            with torch.no_grad():
                expected = theirs(ids, use_cache=False).logits[:, 8:-1].float()
            error = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_cache_is_the_same_in_every_mode(
    name: str, checkpoints: dict[str, tuple[Path, Any]]
) -> None:
    """Captured sizes are those of the batches, so that every mode runs the same kernels."""
    path, _ = checkpoints[name]
    prompts = [[(i * 31 + j) % 1000 for j in range(16)] for i in range(4)]
    caches, tokens = [], []
    for mode in ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"):
        graphs = GraphConfig(mode=mode, capture_sizes=[4, 64])
        with open_llm(path, graphs=graphs, enable_prefix_caching=False) as llm:
            layers = llm.engine.runner.kv_cache.layers
            for layer in layers:
                for cache in layer:
                    cache.zero_()
            results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
            tokens.append([result.outputs[0].token_ids for result in results])
            torch.cuda.synchronize()
            caches.append([cache.clone() for layer in layers for cache in layer])
            assert llm.engine.runner.stats.misses == {"NONE": 20, "FULL_DECODE_ONLY": 1}.get(
                mode, 0
            )
    for other in tokens[1:]:
        assert other == tokens[0]
    for other_caches in caches[1:]:
        for ours, first in zip(other_caches, caches[0], strict=True):
            assert first.any()
            assert torch.equal(ours, first)


def test_random_tokens_do_not_depend_on_the_batch(
    checkpoints: dict[str, tuple[Path, Any]],
) -> None:
    path, _ = checkpoints["llama"]
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16)
    with open_llm(path) as llm:
        alone = llm.generate([prompts_for(4)[3]], params)[0].outputs[0].token_ids
        again = llm.generate([prompts_for(4)[3]], params)[0].outputs[0].token_ids
        assert alone == again
        filtered = SamplingParams(temperature=1.0, seed=11, max_tokens=16, top_p=0.99999)
        through_sampler = llm.generate([prompts_for(4)[3]], filtered)[0].outputs[0].token_ids
        assert through_sampler == alone  # the kernel draws what the full sampler draws
