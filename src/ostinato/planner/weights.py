"""The weights of one rank, counted, and how many of them a step reads.

A step reads all weights of a rank but those of experts that none of its tokens chose. Which these
are is not known, only how many to expect: if routers choose evenly, T tokens touch
E * (1 - (1 - k / E) ** T) of E experts, of which each chooses k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.parallel.layout import ParallelLayout, vocabulary
from ostinato.planner.communication import Model, head_counts

if TYPE_CHECKING:
    from ostinato.models.native.config.decoder_config import DecoderConfig
    from ostinato.models.native.config.experts_config import ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Parameter counts of one rank's shard. ``head`` is 0 if it is tied to the embedding.

    ``layers``: without the ``experts`` that a router chooses from, which are counted apart.
    """

    layers: int
    experts: int
    embedding: int
    head: int
    norm: int

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.embedding + self.head + self.norm


def rank_weights(config: DecoderConfig, layout: ParallelLayout, model: Model) -> RankWeights:
    """Weights of any rank, since all shards are equal. The shift model uses the base's head."""
    parts = layout.tp if model == "base" else layout.world_size
    heads = head_counts(config, layout, model)
    return _weights(config, heads, parts, has_head=model == "base")


def replica_weights(config: DecoderConfig, num_ranks: int) -> RankWeights:
    """Weights of a rank with a whole replica, but for experts, of which it has its share."""
    return _weights(config, (config.num_heads, config.num_kv_heads), 1, num_spread=num_ranks)


def experts_touched(experts: ExpertsConfig, num_tokens: float) -> float:
    """How many of a layer's experts at least one of the tokens chooses, in expectation."""
    chosen = experts.options.top_k / experts.num_experts
    return float(experts.num_experts * (1 - (1 - chosen) ** num_tokens))


def num_mixtures(config: DecoderConfig) -> int:
    """The number of layers with experts."""
    if config.experts is None:
        return 0
    return sum(layer in config.experts.layers for layer in range(config.num_layers))


def _weights(
    config: DecoderConfig,
    heads: tuple[int, int],
    parts: int,
    *,
    num_spread: int = 1,
    has_head: bool = True,
) -> RankWeights:
    """Each expert is in ``parts``, or whole experts are spread over ``num_spread`` ranks."""
    hidden, size, experts = config.hidden_size, config.head_dim, config.experts
    queries, keys = heads[0] * size, heads[1] * size
    attention = _latent_weights(config, heads[0])
    if config.latent is None:
        attention = hidden * (2 * queries + 2 * keys) + (queries + 2 * keys) * config.qkv_bias
    attention += hidden * (config.names.num_norms * (1 + config.norm_bias) + config.output_bias)
    attention += (queries + keys) * bool(config.qk_norm) + heads[0] * config.sinks
    width = config.intermediate_size // parts
    dense = hidden * (2 + config.gated) * width
    dense += ((1 + config.gated) * width + hidden) * config.mlp_bias
    num_sparse = num_mixtures(config)
    layers = attention * config.num_layers + dense * (config.num_layers - num_sparse)
    chosen_from = 0
    if experts is not None:
        routed = hidden + experts.router_bias + experts.correction
        shared = experts.shared_width or 0
        always = routed * experts.num_experts + 3 * hidden * shared // parts
        layers += num_sparse * (always + hidden * experts.shared_gate)
        chosen_from = num_sparse * expert_weights(config, parts) * experts.num_experts // num_spread
    table = len(vocabulary(config.vocab_size, parts, 0)) * hidden
    return RankWeights(
        layers=layers,
        experts=chosen_from,
        embedding=table,
        head=table if has_head and not config.tied_head else 0,
        norm=hidden * (1 + config.norm_bias),
    )


def _latent_weights(config: DecoderConfig, num_heads: int) -> int:
    """Of latent attention, norms inside it included. What comes before heads is not split."""
    latent, hidden = config.latent, config.hidden_size
    if latent is None:
        return 0
    queries, from_latent = num_heads * latent.query_dim, latent.q_lora_rank or 0
    first = (from_latent or queries) + latent.row_dim
    up = num_heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank
    weights = first * (hidden + config.qkv_bias) + from_latent * (queries + 1)
    return weights + up + latent.kv_lora_rank + num_heads * latent.v_head_dim * hidden


def expert_weights(config: DecoderConfig, parts: int = 1) -> int:
    """Parameters of one expert, or of a part of it."""
    experts = config.experts
    if experts is None:
        return 0
    width, hidden = experts.width // parts, config.hidden_size
    return 3 * hidden * width + (2 * width + hidden) * experts.biases
