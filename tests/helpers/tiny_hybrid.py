"""Tiny configs of models with recurrent layers, and what transformers makes of them.

Like those of ``tiny_models``; several heads share what they can share, and no multiplier is 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers_tokens import greedy_tokens, logits_of_tokens

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ATTENTION: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}


def _lfm2() -> PretrainedConfig:
    return transformers.Lfm2Config(
        **_ATTENTION, layer_types=["conv", "conv", "full_attention", "conv"], conv_bias=True
    )


def _lfm2_moe() -> PretrainedConfig:
    layer_types = ["conv", "full_attention", "conv", "conv"]
    return transformers.Lfm2MoeConfig(
        **_ATTENTION, **_EXPERTS, layer_types=layer_types, num_dense_layers=1, conv_L_cache=4
    )


def _qwen3_next() -> PretrainedConfig:
    return transformers.Qwen3NextConfig(
        **_ATTENTION, **_LINEAR, **_EXPERTS, head_dim=16, shared_expert_intermediate_size=32
    )


def _qwen3_5() -> PretrainedConfig:
    return transformers.Qwen3_5TextConfig(**_ATTENTION, **_LINEAR, head_dim=16)


def _qwen3_5_moe() -> PretrainedConfig:
    return transformers.Qwen3_5MoeTextConfig(
        **_ATTENTION, **_LINEAR, **_EXPERTS, head_dim=16, shared_expert_intermediate_size=32
    )


def _mamba2() -> PretrainedConfig:
    return transformers.Mamba2Config(
        **_COMMON, num_heads=8, head_dim=16, n_groups=2, state_size=12, chunk_size=16, use_bias=True
    )


def _bamba() -> PretrainedConfig:
    return transformers.BambaConfig(**_ATTENTION, **_MAMBA, attn_layer_indices=[2])


def _granite() -> PretrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **_ATTENTION,
        **_MAMBA,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    )


def _falcon_h1(**options: Any) -> PretrainedConfig:
    return transformers.FalconH1Config(
        **_ATTENTION,
        **{**_MAMBA, "mamba_n_heads": 4},
        mamba_d_ssm=64,
        ssm_multipliers=[1.5, 0.7, 0.9, 1.1, 1.3],
        ssm_in_multiplier=0.8,
        ssm_out_multiplier=1.2,
        attention_in_multiplier=1.2,
        key_multiplier=0.9,
        lm_head_multiplier=0.7,
        embedding_multiplier=1.4,
        **options,
    )


TINY_HYBRID: dict[str, Callable[[], PretrainedConfig]] = {
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "lfm2_moe": _lfm2_moe,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": lambda: _falcon_h1(mamba_rms_norm=False),
    "falcon_h1_normed": lambda: _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon_h1_norm_first": lambda: _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=True),
}


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


class Reference:
    """transformers' own model of a checkpoint: its tokens, and its logits for any tokens."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        auto: Any = AutoModelForCausalLM,
    ) -> None:
        model: Any = auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self._model = model.to(device).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy, alone, by transformers' own ``generate`` with its own cache."""
        return greedy_tokens(self._model, prompt, num_tokens)

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Of every generated token, in one pass over the whole sequence."""
        return logits_of_tokens(self._model, prompt, tokens)
