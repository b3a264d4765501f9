"""The native decoder against transformers' own modules, on the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato import set_forward_context
from ostinato.attention.base import AttentionBackend
from ostinato.errors import ConfigError
from ostinato.loading.load import load_model
from ostinato.models.native import fused_kernels
from ostinato.models.native.config.decoder_config import DecoderConfig, supports, unsupported_reason
from ostinato.models.native.config.rotary import Rotary
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.models.native.shapes import shape_config
from ostinato.ops.gemm.split_k import in_parts

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


LLAMA3_ROPE = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, head_dim": LlamaConfig(**SIZES, head_dim=16),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama, linear rope": LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)),
    "llama, yarn rope": LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "llama, dynamic rope": LlamaConfig(**SIZES, rope_parameters=rope("dynamic", factor=2.0)),
    "llama, longrope": LlamaConfig(
        **SIZES,
        rope_parameters=rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[2.0] * 6,
            factor=2.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral, window": MistralConfig(**SIZES, sliding_window=5),
    "ministral": MinistralConfig(**SIZES, head_dim=16, sliding_window=5, layer_types=ALTERNATING),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, some windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3, tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3, biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "qwen3, layer types": Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=ALTERNATING,
    ),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        sliding_window=4,
        tie_word_embeddings=False,
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=16, tie_word_embeddings=False),
    "deepseek_v2": DeepseekV2Config(
        **SIZES | LATENT,
        q_lora_rank=None,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.0,
        rope_parameters=rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.5, mscale_all_dim=0.8
        ),
    ),
    "deepseek_v3, dense": DeepseekV3Config(
        **SIZES | LATENT, q_lora_rank=20, attention_bias=True, first_k_dense_replace=3
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        final_logit_softcapping=20.0,
        sliding_window=4,
        layer_types=ALTERNATING,
        rope_parameters={
            "sliding_attention": rope("default"),
            "full_attention": rope("linear", rope_theta=1e5, factor=8.0),
        },
        tie_word_embeddings=False,
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo2, biases": Olmo2Config(**SIZES, attention_bias=True),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=0.5,
        attention_bias=True,
    ),
    "phi3, window": Phi3Config(**SIZES, pad_token_id=0, sliding_window=5),
    "phi3, partial rope": Phi3Config(
        **SIZES, pad_token_id=0, rope_parameters=rope("default", partial_rotary_factor=0.67)
    ),
    "phi3, partial longrope": Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters=rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0] * 4,
            partial_rotary_factor=0.67,
        ),
    ),
    # All experts of a token run, so that no rounding changes which ones do.
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=3,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "olmo3": Olmo3Config(
        **SIZES,
        sliding_window=4,
        layer_types=ALTERNATING,
        rope_parameters={"sliding_attention": rope("default"), "full_attention": YARN_ROPE},
    ),
    "smollm3": SmolLM3Config(
        **SIZES,
        pad_token_id=0,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=4,
        attention_bias=True,
        mlp_bias=True,
    ),
    "smollm3, no windows": SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layer_interval=2),
    "smollm3, layer types": SmolLM3Config(  # they decide, not use_sliding_window
        **SIZES, pad_token_id=0, no_rope_layers=[0, 0, 0], sliding_window=4, layer_types=ALTERNATING
    ),
    "seed_oss": SeedOssConfig(
        **SIZES, head_dim=16, attention_out_bias=True, mlp_bias=True, residual_dropout=0.0
    ),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "exaone4": Exaone4Config(**SIZES, sliding_window=4, layer_types=ALTERNATING),
    "exaone4, no windows": Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "cohere2": Cohere2Config(
        **SIZES,
        logit_scale=2.0,
        sliding_window=4,
        layer_types=ALTERNATING,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=4, tie_word_embeddings=False),
    "starcoder2, no biases": Starcoder2Config(
        **SIZES, use_bias=False, hidden_act="gelu", tie_word_embeddings=False
    ),
    "nemotron": NemotronConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
    "glm4": Glm4Config(**SIZES, pad_token_id=0, head_dim=16),
    "glm4, all of each head": Glm4Config(
        **SIZES,
        pad_token_id=0,
        head_dim=16,
        attention_bias=False,
        rope_parameters=rope("default", partial_rotary_factor=1.0),
    ),
}


def with_rope(config: Any, parameters: dict[str, Any]) -> Any:
    """``config`` with what a config.json may state, and transformers does not check."""
    config.rope_parameters = parameters
    return config


class DenseCausal(AttentionBackend):
    """Attention over the batch itself, as one request."""

    def forward(
        self, spec: Any, query: Any, key: Any, value: Any, metadata: Any, out: Any, sinks: Any
    ) -> None:
        groups = spec.num_heads // spec.num_kv_heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key).float() * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        positions = torch.arange(query.shape[0], device=query.device)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (spec.window or query.shape[0]))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, value))


def reference(config: Any, path: Path) -> torch.nn.Module:
    """transformers' own model with weights that make every tensor matter, saved to ``path``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # transformers starts norms at 1 and biases at 0
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def run(model: Any, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    if positions is None:
        positions = torch.arange(len(ids), device=ids.device)
    with set_forward_context(attn_metadata=SimpleNamespace(backend=DenseCausal())):
        return model.compute_logits(model.forward(ids, positions))


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(
    name: str, fused: bool, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fused operators, which have bodies for every device, and written out."""
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: fused)
    theirs = reference(CONFIGS[name], tmp_path).to(device)
    loaded = load_model(str(tmp_path), device=device, dtype=torch.float32, show_progress=False)
    assert loaded.generic_reason is None
    assert isinstance(loaded.model, Decoder)
    ids = torch.randint(0, SIZES["vocab_size"], (32,), device=device)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    logits = run(loaded.model, ids)
    assert logits.dtype is torch.float32
    assert expected.std() > 1  # logits that could not tell models apart would prove nothing
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_operators_with_products_in_parts(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of CUDA for many tokens, on any device."""
    monkeypatch.setattr(fused_kernels, "split_k_gemm", lambda x, weight: in_parts(x, weight, 2))
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: True)
    theirs = reference(CONFIGS[name], tmp_path).to(device)
    model = load_model(str(tmp_path), device=device, dtype=torch.float32, show_progress=False).model
    ids = torch.randint(0, SIZES["vocab_size"], (32,), device=device)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(model, ids), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONFIGS)
def test_gemms_that_add_to_the_residual(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with many tokens: in place, but not where the states that are given out are kept."""
    monkeypatch.setattr(fused_kernels, "MOST_ROWS", 0)
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: True)
    theirs = reference(CONFIGS[name], tmp_path).to(device)
    model = load_model(str(tmp_path), device=device, dtype=torch.float32, show_progress=False).model
    assert isinstance(model, Decoder)
    ids = torch.randint(0, SIZES["vocab_size"], (32,), device=device)
    states = {
        layer: torch.empty(32, SIZES["hidden_size"], device=device)
        for layer in range(len(model.layers))
    }
    with torch.no_grad():
        expected = theirs(ids[None], output_hidden_states=True)
        torch.testing.assert_close(run(model, ids), expected.logits[0], atol=1e-4, rtol=1e-5)
        model.set_aux_hidden_states(states)
        torch.testing.assert_close(run(model, ids), expected.logits[0], atol=1e-4, rtol=1e-5)
    for layer, state in states.items():
        wanted = expected.hidden_states[layer][0]
        largest = wanted.abs().max().item()  # rounding of a sum follows its largest terms
        torch.testing.assert_close(state, wanted, atol=1e-5 * largest, rtol=0)


def test_a_gemm_adds_in_place_to_sums_that_nothing_else_refers_to() -> None:
    kernels = fused_kernels.LargeM([], torch.arange(3))
    norm = RMSNorm((4,), 1e-6, device=torch.device("cpu"), dtype=torch.float32)
    norm.weight.data.fill_(1.0)
    gemm = fused_kernels.PendingGemm(torch.nn.Linear(4, 4, bias=False), torch.randn(3, 4))
    given, x = torch.randn(3, 4), torch.randn(3, 4)
    before = given.clone()
    with torch.no_grad():
        _, first = kernels.norm(norm, gemm, given)  # the caller's: copied
        assert first is not given
        assert torch.equal(given, before)
        assert kernels.norm(norm, gemm, first)[1] is first
        _, total = kernels.norm(norm, x, first)  # as after experts, or a GEMM with a bias
        assert kernels.norm(norm, gemm, total)[1] is total
        handed_out = kernels.add(gemm, total)
        kept = handed_out.clone()
        assert kernels.norm(norm, gemm, handed_out)[1] is not handed_out
        assert torch.equal(handed_out, kept)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_llama3_frequencies_are_transformers_to_the_bit(name: str) -> None:
    config = shape_config(name).to_hf()
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rotary = Rotary.from_hf(config, config.head_dim)
    assert rotary.inverse_frequencies == tuple(expected.tolist())
    assert rotary.scale == scale


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3, tied",
        "gemma2",
        "gemma3",
        "olmo2",
        "granite",
        "glm4",
        "smollm3",
        "exaone4",
        "cohere2",
        "starcoder2",
        "nemotron",
        "qwen2_moe",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3, dense",
    ],
)
def test_half_precision(
    name: str,
    dtype: torch.dtype,
    fused: bool,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused, with the kernels for few tokens, or operators of torch in their place."""
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: fused)
    theirs = reference(CONFIGS[name], tmp_path).to(device)
    model = load_model(str(tmp_path), device=device, dtype=dtype, show_progress=False).model
    ids = torch.randint(0, SIZES["vocab_size"], (20,), device=device)
    # Some virtual machines report AMX and stop oneDNN with an illegal instruction when it is used.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        exact = theirs(ids[None]).logits[0]
        rounded = theirs.to(dtype)(ids[None]).logits[0].float()
        logits = run(model, ids)
    assert logits.dtype is model.dtype is dtype
    # Rounding differs from operator to operator; it must not be worse than transformers' own.
    assert (logits.float() - exact).norm() <= 1.5 * (rounded - exact).norm()


def test_positions_need_not_start_at_zero(tmp_path: Path, device: torch.device) -> None:
    theirs = reference(CONFIGS["llama, yarn rope"], tmp_path).to(device)
    model = load_model(str(tmp_path), device=device, dtype=torch.float32, show_progress=False).model
    ids = torch.randint(0, SIZES["vocab_size"], (8,), device=device)
    positions = torch.arange(40, 48, device=device)
    with torch.no_grad():
        expected = theirs(ids[None], position_ids=positions[None]).logits[0]
    torch.testing.assert_close(run(model, ids, positions), expected, atol=1e-4, rtol=1e-5)


def test_a_limited_table_changes_nothing_within_it(tmp_path: Path, device: torch.device) -> None:
    reference(CONFIGS["llama"], tmp_path)
    whole, limited = (
        load_model(
            str(tmp_path),
            device=device,
            dtype=torch.float32,
            max_position=limit,
            show_progress=False,
        ).model
        for limit in (None, 16)
    )
    assert (whole.max_position, limited.max_position) == (64, 16)
    assert limited.rotary_table.shape == (16, 12)
    ids = torch.arange(16, device=device)
    assert torch.equal(run(whole, ids), run(limited, ids))


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("llama", 64),
        ("llama, dynamic rope", 64),
        ("llama, longrope", 32),
        ("phi3, partial longrope", 32),
        ("llama, yarn rope", 64),
    ],
)
def test_longest_sequence(name: str, longest: int) -> None:
    config = DecoderConfig.from_hf(CONFIGS[name])
    assert config.max_position == longest
    meta = torch.device("meta")
    with pytest.raises(ConfigError, match=f"{longest + 1} tokens, .* supports 1 to {longest};"):
        Decoder(config, device=meta, dtype=torch.float32, max_position=longest + 1)


def test_yarn_extends_the_stated_length() -> None:
    settings = SIZES | {"max_position_embeddings": 16}
    config = DecoderConfig.from_hf(Qwen2Config(**settings, rope_parameters=YARN_ROPE))
    assert config.max_position == 64


def test_specs_say_what_attention_needs() -> None:
    config = DecoderConfig.from_hf(CONFIGS["qwen3, layer types"])
    model = Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16)
    assert [spec.layer for spec in model.attention_specs] == [0, 1, 2]
    assert [spec.window for spec in model.attention_specs] == [4, None, 4]
    spec = model.attention_specs[0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (4, 2, 16, 16)
    assert spec.scale == 0.25
    assert (model.vocab_size, model.hidden_size) == (97, 48)


def test_few_layers_are_two_of_each_kind() -> None:
    config = dataclasses.replace(
        DecoderConfig.from_hf(CONFIGS["mistral"]),
        num_layers=7,
        windows=(None, 4, 4, None, None, 4, 9),
    )
    model = Decoder(config, device=torch.device("meta"), dtype=torch.float32)
    whole = list(model.decoder_layers())
    with model.few_layers():
        kept = [whole.index(layer) for layer in model.decoder_layers()]
    assert sorted(kept) == [0, 1, 2, 3, 6]
    assert list(model.decoder_layers()) == whole
    with pytest.raises(KeyboardInterrupt), model.few_layers():
        raise KeyboardInterrupt
    assert list(model.decoder_layers()) == whole


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("gpt2"), "model_type is 'gpt2'"),
        (LlamaConfig(**SIZES, hidden_act="tanh"), "hidden_act is 'tanh'"),
        (LlamaConfig(**SIZES, quantization_config={"quant_method": "awq"}), "quantized"),
        (
            LlamaConfig(**SIZES, rope_parameters=rope("default", partial_rotary_factor=0.5)),
            r"only a part \(0.5\) of each head",
        ),
        (
            Gemma3TextConfig(**SIZES, use_bidirectional_attention=True),
            "its attention is bidirectional",
        ),
        (
            with_rope(
                Gemma3TextConfig(**SIZES, layer_types=ALTERNATING),
                {"sliding_attention": rope("default")},
            ),
            "do not state RoPE of 'full_attention' layers",
        ),
        (
            with_rope(LlamaConfig(**SIZES), {"full_attention": rope("default")}),
            r"rope_parameters differ by type of layer \(\['full_attention'\]\)",
        ),
        (
            Qwen3Config(**SIZES, layer_types=["chunked_attention"] * 3),
            r"layers of the types \['chunked_attention'\]",
        ),
    ],
)
def test_what_it_cannot_run_it_says(config: Any, reason: str) -> None:
    assert not supports(config)
    assert unsupported_reason(config) is not None
    with pytest.raises(ConfigError, match=reason):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_can_run_it_says(name: str) -> None:
    assert supports(CONFIGS[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"windows": (None,)}, "windows for 1 layers, but 3 layers"),
        ({"head_dim": 11}, "head_dim 11 is odd"),
        ({"hidden_size": 0}, "hidden_size .* not 0"),
        ({"layer_rotaries": (0, 0)}, "RoPE for 2 layers, but 3 layers"),
        (
            {"qk_norm": "head", "layer_norm": True},
            "queries and keys are normed by RMSNorm only, but layer_norm is True",
        ),
    ],
)
def test_impossible_configs(change: dict[str, Any], message: str) -> None:
    config = DecoderConfig.from_hf(CONFIGS["llama"])
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GraniteConfig(**SIZES, logits_scaling=0.0), "granite: .*division"),
        (GraniteConfig(**SIZES, residual_multiplier=-1.0), "residual_scale .* not -1.0"),
        (
            SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[1, 0], layer_types=ALTERNATING),
            "config of smollm3 has types of 3 layers and RoPE for 2, but 3 layers",
        ),
        (Gemma2Config(**SIZES, attn_logit_softcapping=-5.0), "attention_soft_cap .* not -5.0"),
        (
            Glm4Config(
                **SIZES, head_dim=16, rope_parameters=rope("default", partial_rotary_factor=0.2)
            ),
            "do not rotate whole pairs of head_dim 16",
        ),
    ],
)
def test_impossible_options(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_hf(config)


def test_heads_that_are_rotated_in_part_are_read_in_pairs() -> None:
    rotary = DecoderConfig.from_hf(CONFIGS["glm4"]).rotary
    rows = [row for part in rotary.head_rows for row in part]
    assert rows == [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    table = rotary.table(5, torch.device("cpu"))
    assert torch.equal(table[:, 4:8], torch.ones(5, 4))
    assert not table[:, 12:].any()


class CountWork(TorchDispatchMode):
    """Counts the operators that do work; views do none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            self.names.append(func.name())
        return result


@pytest.mark.parametrize(("name", "most"), [("llama", 22), ("qwen3", 27)])
def test_few_operators_per_layer(name: str, most: int) -> None:
    class Free(AttentionBackend):
        def forward(self, *args: Any) -> None:
            pass

    counts = []
    for num_layers in (1, 2):
        config = dataclasses.replace(
            DecoderConfig.from_hf(CONFIGS[name]),
            num_layers=num_layers,
            windows=(None,) * num_layers,
        )
        model = Decoder(config, device=torch.device("cpu"), dtype=torch.float32)
        metadata = SimpleNamespace(backend=Free())
        with set_forward_context(attn_metadata=metadata), CountWork() as work:
            model.forward(torch.arange(3), torch.arange(3))
        counts.append(len(work.names))
    assert counts[1] - counts[0] <= most, work.names
