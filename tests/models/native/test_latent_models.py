"""Models with latent attention on the native decoder: their cache, chunks, reuse, and refusals.

Their tokens are compared with transformers' in ``test_parity.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MIXTURES, VOCAB_SIZE, save_tiny
from transformers import AutoModelForCausalLM

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.attention.paged import PagedBatch
from ostinato.attention.reference import latent_cpu
from ostinato.attention.reference.paged_cpu import Queries
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.load import load_model
from ostinato.models.native.config.decoder_config import DecoderConfig, unsupported_reason
from ostinato.models.native.config.latent_config import LatentConfig
from ostinato.models.native.decoder import Decoder
from ostinato.offload.offload_config import OffloadConfig
from ostinato.runner.kv_cache import KVCache, bytes_per_block

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY_MIXTURES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention, and no experts."""
    config: Any = TINY_MIXTURES["deepseek_v3"]()
    config.first_k_dense_replace = config.num_hidden_layers
    return save_tiny(config, tmp_path_factory.mktemp("dense"))


def open_llm(path: Path, mode: str = "FULL_AND_PIECEWISE", **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "max_model_len": 128,
        "kv_cache_memory_bytes": "16M",
        "graphs": GraphConfig(mode=mode, capture_sizes=[4, 48]),
        "show_progress": False,
    }
    return LLM(path, **{**options, **settings})


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]


def expected_tokens(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [_expected(path, tuple(prompt)) for prompt in prompts]


@cache
def _expected(path: Path, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    output = _transformers_model(path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@cache
def _transformers_model(path: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=source).tolist()


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The requests whose keys were expanded in one layer: queries, and keys of the cache."""
    found: list[tuple[int, int]] = []
    run = latent_cpu.attend_requests

    def attend_requests(requests: list[Queries], query: torch.Tensor, batch: PagedBatch) -> None:
        found.extend((each.query_len, each.seq_len - each.query_len) for each in requests)
        run(requests, query, batch)

    monkeypatch.setattr(latent_cpu, "attend_requests", attend_requests)
    return found


@pytest.mark.slow
# Keys are expanded from 34 queries on, or from 27.
@pytest.mark.parametrize(
    "mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
)
def test_chunks_and_prefixes_in_the_cache(
    checkpoint: Path, mode: str, expanded: list[tuple[int, int]]
) -> None:
    """Prompts in chunks of at most 48 tokens, among decoded ones; others that begin as they do."""
    first = [prompt_of(20, 0), prompt_of(100, 1), prompt_of(40, 2)]
    second = [first[1][:64] + prompt_of(45, 3), first[2] + [5]]
    with open_llm(checkpoint, mode) as llm:
        expanded.clear()  # captures are no steps
        assert tokens_of(llm, first) == expected_tokens(checkpoint, first)
        results = llm.generate(second, GREEDY)
    assert [result.num_cached_tokens for result in results] == [64, 32]
    tokens = [result.outputs[0].token_ids for result in results]
    assert tokens == expected_tokens(checkpoint, second)
    # Beside a decoded token, behind a chunk; and behind a prefix of another request.
    assert {(47, 28), (45, 64)} <= set(expanded)
    assert min(queries for queries, _ in expanded) > 26


@pytest.mark.slow
def test_preemption(checkpoint: Path, expanded: list[tuple[int, int]]) -> None:
    prompts = [prompt_of(60, 0), prompt_of(50, 1), prompt_of(40, 2)]
    options = {"kv_cache_tokens": 128, "max_model_len": 80, "enable_prefix_caching": False}
    with open_llm(checkpoint, **options) as llm:
        expanded.clear()
        assert tokens_of(llm, prompts) == expected_tokens(checkpoint, prompts)
        assert llm.engine.scheduler.num_preemptions > 0
    assert expanded


@pytest.mark.parametrize("setting", ["offload", "speculative"])
def test_with_other_capabilities(checkpoint: Path, setting: str) -> None:
    options: dict[str, Any] = {
        "offload": OffloadConfig(group=1, offloaded=1, prefetch=1),
        "speculative": "ngram",
    }
    prompts = [prompt_of(9, 3) * 3, prompt_of(20, 4)]
    with open_llm(checkpoint, **{setting: options[setting]}) as llm:
        assert tokens_of(llm, prompts) == expected_tokens(checkpoint, prompts)


def test_the_cache_has_one_row_per_token(checkpoint: Path) -> None:
    model = load_model(str(checkpoint), device=CPU, dtype=torch.float32, show_progress=False).model
    assert isinstance(model, Decoder)
    latent = model.config.latent
    assert latent is not None
    specs = model.attention_specs
    per_token = len(specs) * (latent.kv_lora_rank + latent.qk_rope_head_dim) * 4
    assert bytes_per_block(specs, 16, torch.float32) == 16 * per_token
    cache = KVCache(specs, num_blocks=3, block_size=16, dtype=torch.float32, device=CPU)
    assert cache.num_bytes == 3 * 16 * per_token
    for keys, values in cache.layers:
        assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
        assert keys.shape == (3, 16, 1, latent.row_dim)
        assert values.shape == (3, 16, 1, latent.kv_lora_rank)


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    path = save_tiny(TINY_MIXTURES["deepseek_v3"](), tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(2, 2),
        "model.layers.2.enorm.weight": torch.ones(2),
    }
    save_file(tensors | more, file, metadata={"format": "pt"})
    with open_llm(path) as llm:
        prompts = [prompt_of(7, 5)]
        assert tokens_of(llm, prompts) == expected_tokens(path, prompts)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(2)}, file)
    with pytest.raises(ModelLoadError, match=r"layers\.3\.enorm.* does not use"):
        open_llm(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, "enable_lora needs a dense model .*it has latent attention"),
        ({"swiftkv_layers": 1}, "SwiftKV needs keys and values of every head"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str, dense: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(dense, **settings)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("deepseek_v2", {"attention_bias": True}, "attention_bias is true, and its q_lora_rank"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is true"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', not one of"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ],
)
def test_other_models_are_left_to_transformers(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    config = TINY_MIXTURES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    assert reason in str(unsupported_reason(config))


def test_invalid_sizes() -> None:
    sizes: dict[str, Any] = dict.fromkeys(
        ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"), 8
    )
    for name, value in itertools.product(sizes, (0, 2.0, None)):
        if (name, value) != ("q_lora_rank", None):
            with pytest.raises(
                ConfigError, match=f"{name} must be an integer from 1 .*not {value}"
            ):
                LatentConfig(**{**sizes, name: value})
    config = DecoderConfig.from_hf(TINY_MIXTURES["deepseek_v2"]())
    with pytest.raises(ConfigError, match=r"head_dim is 16; .* must equal qk_rope_head_dim, 8"):
        dataclasses.replace(config, head_dim=16)


def test_scores_grow_with_the_context_of_yarn() -> None:
    """By transformers' own number."""
    config: Any = TINY_MIXTURES["deepseek_v2"]()
    layer = transformers.DeepseekV2ForCausalLM(config).model.layers[0]
    assert DecoderConfig.from_hf(config).attention_scale == pytest.approx(layer.self_attn.scaling)
