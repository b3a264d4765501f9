"""Latent attention of prompts with the sizes of DeepSeek's heads, and models that have them.

Compared with a dense softmax in float64, and with transformers in float32. Some prompts are
expanded, others are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from latent_batches import (
    Case,
    check_replays,
    expand_small_batches,
    layout_of,
    make,
    padding_to,
)
from paged_batches import Mix
from tiny_models import TINY_MIXTURES, VOCAB_SIZE, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.attention.triton import prefill_attention as hopper
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.compat import runs_gluon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
HALVES = [torch.float16, torch.bfloat16]
PROMPTS: Mix = ((200, 300), (1, 90), (700, 0), (30, 40), (171, 5))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    expand_small_batches(monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Columns of keys and values in calls of the kernel for prompts on Hopper."""
    seen: list[tuple[int, int]] = []
    original = hopper.prefill_attention

    def counted(query: torch.Tensor, batch: Any, **options: Any) -> None:
        seen.append((query.shape[2], batch.out.shape[2]))
        original(query, batch, **options)

    monkeypatch.setattr(hopper, "prefill_attention", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("heads", "requests"), [(16, PROMPTS), (128, ((180, 100), (3, 200)))])
def test_prompts(
    heads: int, requests: Mix, dtype: torch.dtype, calls: list[tuple[int, int]]
) -> None:
    layout = layout_of(heads, 512, 64, requests=requests, dtype=dtype)
    make(layout, 64, CUDA, nope=128, value=128).check(TritonPagedAttention())
    expected = [(192, 128)] if runs_gluon(CUDA) and dtype.itemsize == 2 else []
    assert calls == expected


@pytest.mark.parametrize("dtype", HALVES)
def test_replays(dtype: torch.dtype) -> None:
    mixes: list[Mix] = [((200, 300), (1, 0)), ((1, 40), (171, 0), (300, 64)), ((70, 16), (2, 0))]

    def case(mix: Mix, seed: int) -> Case:
        layout = layout_of(
            16, 512, 64, requests=mix, seed=seed, dtype=dtype, **padding_to(512, mix)
        )
        return make(layout, 64, CUDA, nope=128, value=128, min_blocks=64)

    check_replays(TritonPagedAttention(), mixes, case, CUDA)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: Any = TINY_MIXTURES["deepseek_v3"]()
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    for name, size in (sizes | {"v_head_dim": 128, "head_dim": 64, "qk_head_dim": 192}).items():
        setattr(config, name, size)
    config.max_position_embeddings = 1024
    return save_tiny(config, tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_tokens_of_transformers(mode: str, checkpoint: Path) -> None:
    """Prompts in chunks of at most 256 tokens, among decoded ones; others that begin as they do."""
    draw = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist()

    first = [prompt(20), prompt(600), prompt(300)]
    second = [first[1][:512] + prompt(200), first[2] + [5]]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found: list[list[int]] = []
    with LLM(
        checkpoint,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=1024,
        kv_cache_tokens=4096,
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [4, 256]),
        show_progress=False,
    ) as llm:
        for prompts in (first, second):
            found += [result.outputs[0].token_ids for result in llm.generate(prompts, greedy)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32
    ).to(CUDA)
    model.generation_config.eos_token_id = None
    for ids, tokens in zip([*first, *second], found, strict=True):
        batch = torch.tensor([ids], device=CUDA)
        output = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=8, do_sample=False
        )
        assert output[0, len(ids) :].tolist() == tokens
