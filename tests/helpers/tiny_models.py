"""Tiny checkpoints with random weights, one per architecture, for tests that compare with
transformers.

The configs keep what makes an architecture itself (soft caps, alternating windows, sinks, latent
attention, expert routing) and shrink the rest. Windows are shorter than the tests' prompts. Nothing
here is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

VOCAB_SIZE = 128
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"]


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _opt() -> PretrainedConfig:
    # The embedding is narrower than the layers, as in OPT-350m: hidden states are projected out.
    sizes = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
    return transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=32)


def _gpt_neox() -> PretrainedConfig:
    return transformers.GPTNeoXConfig(**_COMMON)


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(
        **_GROUPED,
        tie_word_embeddings=False,  # tied, with embeddings this large, it would repeat its input
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **_GROUPED,
        tie_word_embeddings=False,  # tied, with embeddings this large, it would repeat its input
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )


def _gemma() -> PretrainedConfig:
    return transformers.GemmaConfig(**_GROUPED, tie_word_embeddings=False, head_dim=16)


def _phi3() -> PretrainedConfig:
    return transformers.Phi3Config(**_GROUPED, sliding_window=WINDOW)


def _phi4_mini() -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return transformers.Phi3Config(**_GROUPED, rope_parameters=rope, tie_word_embeddings=True)


def _stablelm() -> PretrainedConfig:
    return transformers.StableLmConfig(**_GROUPED, qk_layernorm=True, use_qkv_bias=True)


def _olmo2() -> PretrainedConfig:
    return transformers.Olmo2Config(**_GROUPED)


def _granite() -> PretrainedConfig:
    return transformers.GraniteConfig(
        **_GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    )


def _cohere() -> PretrainedConfig:
    return transformers.CohereConfig(**_GROUPED, logit_scale=0.5, use_qk_norm=True)


def _glm4() -> PretrainedConfig:
    return transformers.Glm4Config(**_GROUPED, head_dim=16, attention_bias=True)


def _olmo3() -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {
        **rope,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.Olmo3Config(
        **_GROUPED,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={"sliding_attention": rope, "full_attention": scaled},
    )


def _smollm3() -> PretrainedConfig:
    return transformers.SmolLM3Config(
        **_GROUPED,
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=WINDOW,
    )


def _seed_oss() -> PretrainedConfig:
    return transformers.SeedOssConfig(**_GROUPED, head_dim=32, attention_out_bias=True)


def _ernie4_5() -> PretrainedConfig:
    return transformers.Ernie4_5Config(**_GROUPED, head_dim=32, use_bias=True)


def _exaone4() -> PretrainedConfig:
    return transformers.Exaone4Config(**_GROUPED, sliding_window=WINDOW, layer_types=_ALTERNATING)


def _cohere2() -> PretrainedConfig:
    return transformers.Cohere2Config(
        **_GROUPED,
        tie_word_embeddings=False,
        logit_scale=0.5,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )


def _starcoder2() -> PretrainedConfig:
    return transformers.Starcoder2Config(
        **_GROUPED, tie_word_embeddings=False, sliding_window=WINDOW
    )


def _nemotron() -> PretrainedConfig:
    return transformers.NemotronConfig(**_GROUPED, mlp_bias=True)


def _mixtral() -> PretrainedConfig:
    return transformers.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    )


def _qwen3_moe() -> PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_GROUPED,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )


def _qwen2_moe() -> PretrainedConfig:
    return transformers.Qwen2MoeConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=WINDOW,
    )


def _olmoe() -> PretrainedConfig:
    return transformers.OlmoeConfig(
        **_GROUPED, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False
    )


def _glm4_moe() -> PretrainedConfig:
    return transformers.Glm4MoeConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
    )


def _deepseek_v2() -> PretrainedConfig:
    return transformers.DeepseekV2Config(
        **{**_COMMON, "num_hidden_layers": 3},
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=24,
        rms_norm_eps=1e-2,  # not that of latent vectors
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.5,
            "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 64,
        },
    )


def _deepseek_v3() -> PretrainedConfig:
    return transformers.DeepseekV3Config(
        **_COMMON,
        num_key_value_heads=4,
        attention_bias=True,
        q_lora_rank=24,
        kv_lora_rank=40,
        rms_norm_eps=1e-2,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    )


def _gpt_oss() -> PretrainedConfig:
    return transformers.GptOssConfig(
        **_GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**_GROUPED)


def _llama3() -> PretrainedConfig:
    return transformers.LlamaConfig(
        **_GROUPED,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_GROUPED, sliding_window=WINDOW)


def _qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(**_GROUPED, tie_word_embeddings=True)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_GROUPED, head_dim=32)


# These run through transformers' own modules.
TINY_GENERIC: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "stablelm": _stablelm,
    "cohere": _cohere,
}


def _dbrx() -> PretrainedConfig:
    return transformers.DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        vocab_size=VOCAB_SIZE,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={
            "hidden_size": 64,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _jetmoe() -> PretrainedConfig:
    options = {name: value for name, value in _GROUPED.items() if name != "num_attention_heads"}
    return transformers.JetMoeConfig(
        **options, kv_channels=16, num_local_experts=4, num_experts_per_tok=2
    )


def _aria_text() -> PretrainedConfig:
    return transformers.AriaTextConfig(
        **_GROUPED, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    )


# Their experts are routed on the host, in transformers' code: no graph can hold them.
TINY_HOST_READING: dict[str, Callable[[], PretrainedConfig]] = {
    "dbrx": _dbrx,
    "jetmoe": _jetmoe,
    "aria_text": _aria_text,
}

# Run by the native decoder with options that Llama has not: soft caps, norms elsewhere, ...
TINY_WITH_OPTIONS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "phi4_mini": _phi4_mini,
    "olmo2": _olmo2,
    "granite": _granite,
    "glm4": _glm4,
    "olmo3": _olmo3,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
}

# Mixtures of experts on the native decoder.
TINY_MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}

# Dense models on the native decoder.
TINY_NATIVE: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "llama3_rope": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    **TINY_WITH_OPTIONS,
}


def save_tiny(
    config: PretrainedConfig,
    directory: Path,
    seed: int = 0,
    auto: Any = transformers.AutoModelForCausalLM,
) -> Path:
    """Save a model of ``config`` with seeded float32 weights as safetensors in ``directory``.

    Weights are large enough for well-separated logits, so that greedy tokens vary with the prompt.
    Norms, biases, sinks and router corrections are moved off their initial constants, so that
    omitting one shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        embedding = model.get_input_embeddings().weight
        with torch.no_grad():
            for parameter in model.parameters():
                # A large embedding would outweigh the layers: models with tied weights would
                # repeat their input.
                _randomize(parameter, gain=1.0 if parameter is embedding else 2.0)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    return directory


def _randomize(parameter: torch.Tensor, gain: float) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.2)


def save_talking(directory: Path, chat_template: str | None) -> Path:
    """Save a one-layer Llama whose tokens are words: w0, w1, ..., w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    return save_tiny(config, directory)
