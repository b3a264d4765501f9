"""Mixtures of experts on the native decoder: checkpoints' names, counts, and what is refused.

Their tokens are compared with transformers' in ``test_parity.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from tiny_models import TINY_MIXTURES, save_tiny
from transformers import AutoModelForCausalLM

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ConfigError
from ostinato.loading.load import load_model
from ostinato.models.native.config.decoder_config import DecoderConfig, unsupported_reason
from ostinato.models.native.config.experts_config import ExpertsConfig
from ostinato.models.native.decoder import Decoder
from ostinato.offload.offload_config import OffloadConfig
from ostinato.ops.experts.routing import RouterOptions

CPU = torch.device("cpu")


def open_llm(path: Path, mode: str = "FULL_AND_PIECEWISE", **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "16M",
        "graphs": GraphConfig(mode=mode, capture_sizes=[4, 64]),
        "show_progress": False,
    }
    return LLM(path, **{**options, **settings})


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    model = load_model(str(path), device=CPU, dtype=torch.float32, show_progress=False).model
    assert isinstance(model, Decoder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", TINY_MIXTURES)
def test_stacked_experts_are_the_same_model(name: str, tmp_path: Path) -> None:
    """transformers can save experts as its modules have them, all of a layer in one tensor."""
    save_tiny(TINY_MIXTURES[name](), tmp_path / "each")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "each", dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    with safe_open(tmp_path / "stacked" / "model.safetensors", framework="pt") as file:
        assert any(key.endswith("mlp.experts.gate_up_proj") for key in file.keys())  # noqa: SIM118
    each, stacked = weights_of(tmp_path / "each"), weights_of(tmp_path / "stacked")
    assert each.keys() == stacked.keys()
    for key, weight in each.items():
        assert torch.equal(weight, stacked[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE", "FULL"])
def test_load_counts_tokens_and_no_padding(mode: str, tmp_path: Path) -> None:
    save_tiny(TINY_MIXTURES["qwen2_moe"](), tmp_path)
    prompts = [[5, 6, 7], [8] * 20, list(range(10, 19))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with open_llm(tmp_path, mode, enable_prefix_caching=False) as llm:
        assert {sum(counts) for counts in llm.expert_load().values()} == {0}
        llm.generate(prompts, params)
        load = llm.expert_load(reset=True)
        assert {sum(counts) for counts in llm.expert_load().values()} == {0}
    num_computed = sum(map(len, prompts)) + 3 * 5  # the last token is not fed back
    assert list(load) == [0, 2]  # layer 1 is dense
    assert all(len(counts) == 6 and sum(counts) == 2 * num_computed for counts in load.values())


def test_load_of_compiled_pieces(tmp_path: Path) -> None:
    save_tiny(TINY_MIXTURES["mixtral"](), tmp_path)
    graphs = GraphConfig(mode="PIECEWISE", capture_sizes=[4, 64], compile="eager")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with open_llm(tmp_path, graphs=graphs) as llm:
        llm.generate([[5, 6, 7, 8, 9]], params)
        assert {sum(counts) for counts in llm.expert_load().values()} == {2 * (5 + 2)}


def test_models_without_experts_have_no_load() -> None:
    with LLM("tiny", random_weights=True, device="cpu", show_progress=False) as llm:
        assert llm.expert_load() == {}


def test_experts_in_host_memory(tmp_path: Path) -> None:
    save_tiny(TINY_MIXTURES["glm4_moe"](), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for offload in (None, OffloadConfig(group=3, offloaded=2, prefetch=1)):
        with open_llm(tmp_path, offload=offload) as llm:
            result = llm.generate([[5, 6, 7, 8]], params)[0]
            tokens.append(result.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, "enable_lora needs a dense model .*it has a mixture of experts"),
        ({"swiftkv_layers": 1}, "SwiftKV needs a dense model"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny(TINY_MIXTURES["qwen3_moe"](), tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_llm(tmp_path, **settings)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.OlmoeConfig(clip_qkv=8.0), "clip_qkv is 8.0"),
        (transformers.MixtralConfig(hidden_act="gelu_pytorch_tanh"), "experts need 'silu'"),
    ],
)
def test_other_models_are_left_to_transformers(config: Any, reason: str) -> None:
    said = unsupported_reason(config)
    assert said is not None
    assert reason in said


def test_an_output_that_is_scaled_is_refused() -> None:
    config = DecoderConfig.from_hf(TINY_MIXTURES["mixtral"]())
    with pytest.raises(ConfigError, match="cannot scale or norm the output of experts"):
        dataclasses.replace(config, residual_scale=0.5)


def test_a_qwen_without_experts_is_dense() -> None:
    config = transformers.Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert DecoderConfig.from_hf(config).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "number of experts must be an integer from 1 .*, not 0"),
        ({"width": 2.0}, "width of an expert must be an integer from 1 .*, not 2.0"),
        ({"options": RouterOptions(top_k=9)}, "num_experts_per_tok .* from 1 to 8, not 9"),
        ({"options": RouterOptions(top_k=1, num_groups=3)}, "8 experts cannot .* 3 equal"),
        ({"options": RouterOptions(top_k=1, top_groups=2)}, "topk_group .* from 1 to 1, not 2"),
        ({"options": RouterOptions(top_k=5, num_groups=2)}, "5 experts per token .* 4 experts"),
        ({"shared_width": -1}, "width of the shared expert .*, not -1"),
    ],
)
def test_invalid_sizes(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {
        "num_experts": 8,
        "width": 16,
        "options": RouterOptions(top_k=2),
        "layers": frozenset({0}),
    }
    with pytest.raises(ConfigError, match=message):
        ExpertsConfig(**{**sizes, **changes})
