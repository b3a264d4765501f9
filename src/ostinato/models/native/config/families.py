"""The families of models that the native decoder runs: a table of options and names each.

What an entry can say, and options that several of them share, are in ``family.py``.
"""

from __future__ import annotations

from ostinato.models.native.config.expert_options import (
    deepseek_v2_experts,
    deepseek_v2_unsupported_reason,
    glm_experts,
    gpt_oss_experts,
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
)
from ostinato.models.native.config.family import (
    Family,
    WeightNames,
    attention_bias,
    bidirectional_unsupported_reason,
    rotated_where_windowed,
    use_bias,
    window_by_layer,
    window_everywhere,
)
from ostinato.models.native.config.latent_config import (
    latent_options,
    latent_unsupported_reason,
)

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

FAMILIES: dict[str, Family] = {
    "llama": Family(
        options=lambda config: {**attention_bias(config), "mlp_bias": bool(config.mlp_bias)},
        fields={"head_dim": (int,), "attention_bias": (bool,), "mlp_bias": (bool,)},
    ),
    "mistral": Family(
        options=window_everywhere,
        fields={"head_dim": (int,), "sliding_window": (int, type(None))},
        foreign=frozenset({"layer_types"}),  # of Ministral, whose published config is a Mistral's
    ),
    "ministral": Family(options=window_by_layer),
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
        refuses=bidirectional_unsupported_reason,
    ),
    "gemma": Family(
        options=lambda config: {
            "norm_offset": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            **attention_bias(config),
        },
        refuses=bidirectional_unsupported_reason,
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
        refuses=bidirectional_unsupported_reason,
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
            **window_by_layer(config),  # use_sliding_window only fills in layer_types
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
    "ernie4_5": Family(options=use_bias, interleaved=True),
    "exaone4": Family(
        options=lambda config: {"qk_norm": "head", **window_by_layer(config)},
        names=_OLMO_NAMES,
        rotated=rotated_where_windowed,
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
            **use_bias(config),
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
