"""Latent attention (MLA) of a decoder: its sizes, from a model's transformers config.

The cache has one row per token for all heads: a latent vector, from which keys and values are
projected, and a key with RoPE. ``models.native.latent_attention`` computes with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ostinato.models.native.config.size_check import check_size
from ostinato.quoting import shown

_LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The names are those of configs.

    A query head has ``qk_nope_head_dim`` columns without RoPE, then ``qk_rope_head_dim`` with it.
    ``q_lora_rank``: queries come from a latent vector of this size too; None: from one GEMM.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "q_lora_rank":
                continue
            check_size(field.name, value, _LARGEST)

    @property
    def query_dim(self) -> int:
        """Columns of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Columns of a token's row in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def latent_options(config: Any) -> dict[str, Any]:
    """Options of ``DecoderConfig`` that DeepSeek-V2 and V3 have in common."""
    latent = LatentConfig(
        **{field.name: getattr(config, field.name) for field in fields(LatentConfig)}
    )
    first, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return {
        "latent": latent,
        "attention_scale": _scale(latent, config.rope_parameters or {}),
        "qkv_bias": bool(config.attention_bias),
        "output_bias": bool(config.attention_bias),
        "unused_layers": tuple(range(first, first + more)),
    }


def _scale(latent: LatentConfig, rope: dict[str, Any]) -> float:
    """Of scores. With YaRN it grows with the context, by ``mscale_all_dim``."""
    scale: float = latent.query_dim**-0.5
    growth = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not growth or rope["factor"] <= 1:
        return scale
    return scale * float(0.1 * growth * math.log(rope["factor"]) + 1.0) ** 2


def latent_unsupported_reason(config: Any) -> str | None:
    """Why the native decoder cannot run a model with latent attention; None if it can."""
    if config.num_key_value_heads != config.num_attention_heads:
        return (
            f"its num_key_value_heads is {shown(config.num_key_value_heads)}, and latent attention "
            f"has as many as query heads ({shown(config.num_attention_heads)})"
        )
    if config.attention_bias and config.q_lora_rank is None:
        return "its attention_bias is true, and its q_lora_rank null: queries have no bias"
    if getattr(config, "mlp_bias", False):
        return "its mlp_bias is true, and its shared experts would have biases"
    if not getattr(config, "rope_interleave", True):
        return "its rope_interleave is false"
    return None
