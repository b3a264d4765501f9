"""The mixtures of experts of the families that have one, from a model's transformers config.

Each function returns options of ``DecoderConfig``, for the table in ``families.py``.
"""

from __future__ import annotations

from typing import Any

from ostinato.models.native.config.experts_config import ExpertNames, ExpertsConfig
from ostinato.ops.experts.routing import RouterOptions
from ostinato.quoting import shown

_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
)
_GLM = ExpertNames(shared="mlp.shared_experts")
_GPT_OSS = ExpertNames(router="mlp.router", transposed=True)


def qwen_experts(config: Any) -> dict[str, Any]:
    """Qwen2-MoE, with a shared expert behind a gate, and Qwen3-MoE, without."""
    sparse = {
        layer
        for layer in range(config.num_hidden_layers)
        if (layer + 1) % config.decoder_sparse_step == 0 and layer not in config.mlp_only_layers
    }
    # Files of transformers 5 state the one, older ones the other; config objects have both.
    num_experts = getattr(config, "num_local_experts", None)
    if num_experts is None:
        num_experts = config.num_experts
    if num_experts == 0 or not sparse:
        return {}
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        "experts": ExpertsConfig(
            num_experts=num_experts,
            width=config.moe_intermediate_size,
            options=RouterOptions(
                top_k=config.num_experts_per_tok, renormalize=bool(config.norm_topk_prob)
            ),
            layers=frozenset(sparse),
            shared_width=shared,
            shared_gate=shared is not None,
        )
    }


def mixtral_experts(config: Any) -> dict[str, Any]:
    options = RouterOptions(top_k=config.num_experts_per_tok)
    return _in_every_layer(config, config.num_local_experts, options, names=_MIXTRAL)


def olmoe_experts(config: Any) -> dict[str, Any]:
    options = RouterOptions(
        top_k=config.num_experts_per_tok, renormalize=bool(config.norm_topk_prob)
    )
    return _in_every_layer(config, config.num_experts, options)


def glm_experts(config: Any) -> dict[str, Any]:
    """GLM-4-MoE and DeepSeek-V3: a sigmoid router with a correction and groups."""
    options = RouterOptions(
        top_k=config.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        num_groups=config.n_group,
        top_groups=config.topk_group,
        scale=float(config.routed_scaling_factor),
    )
    return _after_dense_layers(config, options, correction=True)


def deepseek_v2_experts(config: Any) -> dict[str, Any]:
    """DeepSeek-V2: softmax scores as they are; transformers ignores norm_topk_prob too."""
    groups: dict[str, Any] = {}
    if config.topk_method == "group_limited_greedy":
        groups = {"num_groups": config.n_group, "top_groups": config.topk_group, "group_best": 1}
    options = RouterOptions(
        top_k=config.num_experts_per_tok,
        renormalize=False,
        scale=float(config.routed_scaling_factor),
        **groups,
    )
    return _after_dense_layers(config, options, correction=False)


def deepseek_v2_unsupported_reason(config: Any) -> str | None:
    """Why its router is not one of ``deepseek_v2_experts``; None if it is."""
    methods = ("greedy", "group_limited_greedy")
    if config.topk_method in methods:
        return None
    return f"its topk_method is {shown(config.topk_method)}, not one of {', '.join(methods)}"


def _after_dense_layers(config: Any, options: RouterOptions, correction: bool) -> dict[str, Any]:
    """Experts, of which some are shared, in all layers but the first ones."""
    sparse = range(config.first_k_dense_replace, config.num_hidden_layers)
    if not sparse:
        return {}
    return {
        "experts": ExpertsConfig(
            num_experts=config.n_routed_experts,
            width=config.moe_intermediate_size,
            options=options,
            layers=frozenset(sparse),
            names=_GLM,
            correction=correction,
            shared_width=config.moe_intermediate_size * config.n_shared_experts or None,
        )
    }


def gpt_oss_experts(config: Any) -> dict[str, Any]:
    """GPT-OSS: biases everywhere, and a clamped activation."""
    return _in_every_layer(
        config,
        config.num_local_experts,
        RouterOptions(top_k=config.num_experts_per_tok),
        names=_GPT_OSS,
        activation="clamped_swiglu",
        router_bias=True,
        biases=True,
    )


def _in_every_layer(
    config: Any, num_experts: int, options: RouterOptions, **others: Any
) -> dict[str, Any]:
    """Experts as wide as ``intermediate_size``, in all layers."""
    return {
        "experts": ExpertsConfig(
            num_experts=num_experts,
            width=config.intermediate_size,
            options=options,
            layers=frozenset(range(config.num_hidden_layers)),
            **others,
        )
    }
