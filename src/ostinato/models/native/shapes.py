"""Named model shapes to run with random weights, so that benchmarks need no download.

The dimensions are those of the published models. Random weights are drawn on the device, so a model
of billions of parameters is ready in seconds; its text is meaningless.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ostinato.errors import ConfigError
from ostinato.models.native.config.raw_config import RawConfig, raw_config
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.norms.layer_norm import LayerNorm
from ostinato.models.native.norms.rms_norm import RMSNorm

_STANDARD_DEVIATION = 0.02


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}

_LLAMA_3: dict[str, Any] = _LLAMA | {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "sliding_window": None,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_SLIDING, _FULL = "sliding_attention", "full_attention"

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "rope_parameters": _llama3(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "rope_parameters": _llama3(8.0),
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "mlp_bias": False,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window": 512,
        "layer_types": [_FULL if layer % 6 == 5 else _SLIDING for layer in range(26)],
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            _FULL: {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    # RoPE is not scaled: as published, sequences of at most 4,096 tokens could be run.
    "phi-4-mini": {
        "model_type": "phi3",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "sliding_window": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        "tie_word_embeddings": True,
        "bos_token_id": 199999,
        "eos_token_id": 199999,
    },
    "smollm2-135m": _LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # For tests and trials. It has no end-of-sequence token, so max_tokens decides the length.
    "tiny": _LLAMA
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def shape_config(name: str) -> RawConfig:
    """The config of the shape called ``name``."""
    if name not in SHAPES:
        raise ConfigError(f"unknown model shape {name!r}; the shapes are {', '.join(SHAPES)}")
    config = raw_config(SHAPES[name])
    assert config is not None, f"the shape {name} is incomplete"
    return config


def draw_weights(model: Decoder, seed: int) -> None:
    """Fill a decoder with random weights, in place; the same ones for the same seed and device."""
    generator = torch.Generator(model.device).manual_seed(seed)
    # The head comes last, even if a decoder created further layers after it, so that the weights
    # equal the plain decoder's.
    for part in model.children():
        if part is not model.lm_head:
            draw_parameters(part, generator)
    if model.lm_head is not None:
        draw_parameters(model.lm_head, generator)


def initial_constant(module: nn.Module, name: str) -> float | None:
    """The value that all of ``module``'s parameter ``name`` has; None: it is drawn."""
    if name.endswith("bias"):
        return 0.0
    return 1.0 if isinstance(module, RMSNorm | LayerNorm) else None


def draw_parameters(module: nn.Module, generator: torch.Generator) -> None:
    """The same for a part of a decoder, from the current state of ``generator``."""
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            constant = initial_constant(inner, name)
            if constant is not None:
                parameter.fill_(constant)
            else:
                here = parameter.device.type == generator.device.type  # else in host memory
                drawn = parameter if here else torch.empty_like(parameter, device=generator.device)
                drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
                if not here:
                    parameter.copy_(drawn)
