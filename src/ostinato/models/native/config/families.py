"""The families of models that the native decoder runs: a table of options and names each.

A family lists the options of ``DecoderConfig`` in which its models differ from Llama, and the names
of the weights in their checkpoints. The names determine the norms of a layer: before attention and
before the MLP (pre-norm, as in Llama), after each (post-norm, as in OLMo 2), or both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.models.native.config.expert_options import (
    deepseek_v2_experts,
    deepseek_v2_unsupported_reason,
    glm_experts,
    gpt_oss_experts,
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
)
from ostinato.models.native.config.latent_config import (
    latent_options,
    latent_unsupported_reason,
)

Types = tuple[type, ...]


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The checkpoint names of a layer's weights. A norm without a name does not exist.

    Weights with the same name are one tensor, in this order: a fused projection.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None

    @property
    def num_norms(self) -> int:
        """Of a layer, those of queries and keys apart."""
        norms = (self.attention_norm, self.attention_output_norm)
        return sum(name is not None for name in (*norms, self.mlp_norm, self.mlp_output_norm))


LLAMA_NAMES = WeightNames()


@dataclass(frozen=True, kw_only=True)
class Family:
    """``options``: fields of ``DecoderConfig``, from a model's config, that differ from Llama's.

    ``activation``: the config field with the name of the activation; ``eps``: that with the norms'
    eps. ``interleaved``: RoPE pairs neighbours (2i, 2i + 1) instead of halves. ``partial_rotary``:
    it uses partial_rotary_factor. ``rotary_by_layer_type``: rope_parameters has an entry for each
    type of layer. ``rotated``: which layers have RoPE. ``experts``: it has a mixture of experts.
    ``refuses``: why a model of the family cannot run, None if it can. ``fields``: further fields
    that a config.json must state to be read without transformers; None: transformers reads it.
    """

    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    names: WeightNames = LLAMA_NAMES
    activation: str = "hidden_act"
    interleaved: bool = False
    partial_rotary: bool = False
    eps: str = "rms_norm_eps"
    rotary_by_layer_type: bool = False
    rotated: Callable[[Any], Sequence[bool]] = lambda config: (True,) * config.num_hidden_layers
    experts: bool = False
    refuses: Callable[[Any], str | None] = lambda config: None
    fields: Mapping[str, Types] | None = field(default=None, hash=False)


# --- options that several families share --------------------------------------------------------


def attention_bias(config: Any) -> dict[str, Any]:
    """On all projections of attention, if the config says so."""
    return {"qkv_bias": bool(config.attention_bias), "output_bias": bool(config.attention_bias)}


def window_everywhere(config: Any) -> dict[str, Any]:
    """The same window in every layer."""
    return {"windows": (config.sliding_window,) * config.num_hidden_layers}


def window_by_layer(config: Any) -> dict[str, Any]:
    """A window in the layers whose type says so. transformers derives the types."""
    window = config.sliding_window
    if window is None:
        return {}
    kinds = config.layer_types
    return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


def _bidirectional(config: Any) -> str | None:
    """Gemma's option for embedding models."""
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional (use_bidirectional_attention)"
    return None


_GEMMA_NAMES = WeightNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
_OLMO_NAMES = WeightNames(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)


def _windowed(config: Any) -> list[bool]:
    """RoPE in the layers that have a window, of models in which some have one."""
    if config.sliding_window is None:
        return [True] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in config.layer_types]


def _use_bias(config: Any) -> dict[str, Any]:
    """On all projections, if the config says so."""
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(config.use_bias))


# --- the families -------------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "llama": Family(
        options=lambda config: {**attention_bias(config), "mlp_bias": bool(config.mlp_bias)},
        fields={"head_dim": (int,), "attention_bias": (bool,), "mlp_bias": (bool,)},
    ),
    "mistral": Family(
        options=window_everywhere,
        fields={"head_dim": (int,), "sliding_window": (int, type(None))},
    ),
    "qwen2": Family(
        options=lambda config: {"qkv_bias": True, **window_by_layer(config)},
        # With a window, transformers' rule decides which layers have it.
        fields={"sliding_window": (type(None),)},
    ),
    "qwen3": Family(
        options=lambda config: {
            "qk_norm": "head",
            **attention_bias(config),
            **window_by_layer(config),
        },
        fields={"head_dim": (int,), "sliding_window": (type(None),), "attention_bias": (bool,)},
    ),
    "granite": Family(
        options=lambda config: {
            "embedding_scale": config.embedding_multiplier,
            "attention_scale": config.attention_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": 1 / config.logits_scaling,
            "mlp_bias": bool(config.mlp_bias),
            **attention_bias(config),
        },
    ),
    "olmo2": Family(
        options=lambda config: {"qk_norm": "full", **attention_bias(config)},
        names=_OLMO_NAMES,
    ),
    "gemma2": Family(
        options=lambda config: {
            "norm_offset": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            "attention_scale": config.query_pre_attn_scalar**-0.5,
            "attention_soft_cap": config.attn_logit_softcapping,
            "logit_soft_cap": config.final_logit_softcapping,
            **attention_bias(config),
            **window_by_layer(config),
        },
        names=_GEMMA_NAMES,
        activation="hidden_activation",
        refuses=_bidirectional,
    ),
    "gemma": Family(
        options=lambda config: {
            "norm_offset": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            **attention_bias(config),
        },
        refuses=_bidirectional,
    ),
    "gemma3_text": Family(  # its attn_logit_softcapping is not used by transformers either
        options=lambda config: {
            "norm_offset": 1.0,
            "qk_norm": "head",
            "embedding_scale": config.hidden_size**0.5,
            "attention_scale": config.query_pre_attn_scalar**-0.5,
            "logit_soft_cap": config.final_logit_softcapping,
            **attention_bias(config),
            **window_by_layer(config),
        },
        names=_GEMMA_NAMES,
        activation="hidden_activation",
        rotary_by_layer_type=True,
        refuses=_bidirectional,
        fields={
            "head_dim": (int,),
            "query_pre_attn_scalar": (int, float),
            "attention_bias": (bool,),
            "sliding_window": (int,),
            "layer_types": (list,),
            "final_logit_softcapping": (float, type(None)),
            "use_bidirectional_attention": (bool, type(None)),
        },
    ),
    "phi3": Family(
        options=window_everywhere,
        names=WeightNames(
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
        ),
        partial_rotary=True,
        fields={"sliding_window": (int, type(None))},
    ),
    "glm4": Family(
        options=lambda config: {"qkv_bias": bool(config.attention_bias)},
        names=WeightNames(
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
            attention_output_norm="post_self_attn_layernorm",
            mlp_output_norm="post_mlp_layernorm",
        ),
        interleaved=True,
        partial_rotary=True,
    ),
    "qwen2_moe": Family(
        options=lambda config: {
            "qkv_bias": bool(config.qkv_bias),
            **window_by_layer(config),
            **qwen_experts(config),
        },
        experts=True,
    ),
    "qwen3_moe": Family(
        options=lambda config: {
            "qk_norm": "head",
            **attention_bias(config),
            **window_everywhere(config),
            **qwen_experts(config),
        },
        experts=True,
        fields={
            "head_dim": (int,),
            "sliding_window": (type(None),),
            "attention_bias": (bool,),
            "num_local_experts": (int,),
            "num_experts_per_tok": (int,),
            "moe_intermediate_size": (int,),
            "norm_topk_prob": (bool,),
            "decoder_sparse_step": (int,),
            "mlp_only_layers": (list,),
        },
    ),
    "mixtral": Family(
        options=lambda config: {**window_everywhere(config), **mixtral_experts(config)},
        experts=True,
        fields={
            "head_dim": (int, type(None)),
            "sliding_window": (int, type(None)),
            "num_local_experts": (int,),
            "num_experts_per_tok": (int,),
        },
    ),
    "olmoe": Family(
        options=lambda config: {
            "qk_norm": "full",
            **attention_bias(config),
            **olmoe_experts(config),
        },
        experts=True,
        refuses=lambda config: (
            None if config.clip_qkv is None else f"its clip_qkv is {config.clip_qkv}, not null"
        ),
    ),
    "gpt_oss": Family(
        options=lambda config: {
            "sinks": True,
            **attention_bias(config),
            **window_by_layer(config),
            **gpt_oss_experts(config),
        },
        experts=True,
    ),
    "glm4_moe": Family(
        options=lambda config: {
            "qk_norm": "head" if config.use_qk_norm else None,
            "qkv_bias": bool(config.attention_bias),
            **glm_experts(config),
        },
        partial_rotary=True,
        experts=True,
    ),
    "deepseek_v2": Family(
        options=lambda config: {**latent_options(config), **deepseek_v2_experts(config)},
        interleaved=True,
        experts=True,
        refuses=lambda config: (
            latent_unsupported_reason(config) or deepseek_v2_unsupported_reason(config)
        ),
        fields={
            "head_dim": (int,),
            "q_lora_rank": (int, type(None)),
            "kv_lora_rank": (int,),
            "qk_nope_head_dim": (int,),
            "qk_rope_head_dim": (int,),
            "v_head_dim": (int,),
            "attention_bias": (bool,),
            "mlp_bias": (bool,),
            "n_routed_experts": (int,),
            "n_shared_experts": (int,),
            "num_experts_per_tok": (int,),
            "moe_intermediate_size": (int,),
            "first_k_dense_replace": (int,),
            "routed_scaling_factor": (int, float),
            "topk_method": (str,),
            "n_group": (int, type(None)),
            "topk_group": (int, type(None)),
        },
    ),
    "deepseek_v3": Family(
        options=lambda config: {**latent_options(config), **glm_experts(config)},
        interleaved=True,
        experts=True,
        refuses=latent_unsupported_reason,
    ),
    "olmo3": Family(
        options=lambda config: {
            "qk_norm": "full",
            **attention_bias(config),
            **window_by_layer(config),
        },
        names=_OLMO_NAMES,
        rotary_by_layer_type=True,
    ),
    "smollm3": Family(
        options=lambda config: {
            "mlp_bias": bool(config.mlp_bias),
            **attention_bias(config),
            **(window_by_layer(config) if config.use_sliding_window else {}),
        },
        rotated=lambda config: [bool(each) for each in config.no_rope_layers],
    ),
    "seed_oss": Family(
        options=lambda config: {
            "qkv_bias": bool(config.attention_bias),
            "output_bias": bool(config.attention_out_bias),
            "mlp_bias": bool(config.mlp_bias),
        },
    ),
    "ernie4_5": Family(options=_use_bias, interleaved=True),
    "exaone4": Family(
        options=lambda config: {"qk_norm": "head", **window_by_layer(config)},
        names=_OLMO_NAMES,
        rotated=_windowed,
    ),
    "cohere2": Family(
        options=lambda config: {
            "parallel": True,
            "layer_norm": True,
            "logit_scale": config.logit_scale,
            **attention_bias(config),
            **window_by_layer(config),
        },
        names=WeightNames(mlp_norm=None),
        eps="layer_norm_eps",
        interleaved=True,
        rotated=lambda config: [
            config.sliding_window is not None and kind == "sliding_attention"
            for kind in config.layer_types
        ],
    ),
    "starcoder2": Family(
        options=lambda config: {
            "gated": False,
            "layer_norm": True,
            "norm_bias": True,
            **_use_bias(config),
            **window_everywhere(config),
        },
        names=WeightNames(up="mlp.c_fc", down="mlp.c_proj"),
        eps="norm_epsilon",
    ),
    "nemotron": Family(
        options=lambda config: {
            "gated": False,
            "layer_norm": True,
            "norm_bias": True,
            "norm_offset": 1.0,
            "mlp_bias": bool(config.mlp_bias),
            **attention_bias(config),
        },
        eps="norm_eps",
        partial_rotary=True,
    ),
}
