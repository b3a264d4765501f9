"""Latent attention (MLA) of a layer: DeepSeek-V2 and V3.

``layer.qkv_proj`` projects to the query, or to a latent vector that it is projected from, and to
the row of the cache: a latent vector of keys and values, and a key with RoPE that all heads share.
Keys and values of a head are projections of the latent vector; ``attention.latent`` says when they
are computed. Ranks split the heads, and each has the rows of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.layer_kernels import AnyKernels, AttentionLayer
from ostinato.models.native.mixture import EmptyLinear
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.models.native.weight_rows import shifted
from ostinato.models.weight_slot import WeightSlot

_EPS = 1e-6  # of the norms here, in every model


class LatentAttention(nn.Module):
    """What a layer has between its first and its last GEMM of attention, uninitialised.

    ``up`` [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]: a latent vector's projections to
    keys, without RoPE, and to values.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        linear: EmptyLinear,
    ) -> None:
        super().__init__()
        assert config.latent is not None
        self.sizes = sizes = config.latent
        self._config = config
        heads = config.num_heads
        self.kv_norm = RMSNorm((sizes.kv_lora_rank,), _EPS, device=device, dtype=dtype)
        self.query_norm: RMSNorm | None = None
        self.query_proj: nn.Linear | None = None
        if sizes.q_lora_rank is not None:
            self.query_norm = RMSNorm((sizes.q_lora_rank,), _EPS, device=device, dtype=dtype)
            self.query_proj = linear(sizes.q_lora_rank, heads * sizes.query_dim)
        shape = heads, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank
        self.up = nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

    def spec(self, layer: int) -> AttentionSpec:
        """Attention over the rows of the cache."""
        sizes, config = self.sizes, self._config
        return AttentionSpec(
            layer=layer,
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=sizes.row_dim,
            value_dim=sizes.kv_lora_rank,
            scale=config.attention_scale or sizes.query_dim**-0.5,
            values_in_keys=True,
        )

    @property
    def first_width(self) -> int:
        """Columns of the first GEMM that are the query's, or its latent vector."""
        return self.sizes.q_lora_rank or self._config.num_heads * self.sizes.query_dim

    def forward(self, first: torch.Tensor, layer: AttentionLayer, run: AnyKernels) -> torch.Tensor:
        """The first GEMM's result -> [T, heads * v_head_dim], as the last GEMM takes it."""
        sizes = self.sizes
        query, compressed = first.split((self.first_width, sizes.row_dim), dim=1)
        if self.query_proj is not None and self.query_norm is not None:
            query = run.project(self.query_proj, run.output_norm(self.query_norm, query))
        heads = query.unflatten(1, (-1, sizes.query_dim))
        return run.attend_latent(layer, self, heads, compressed).flatten(1)

    def first_slots(self, prefix: str, first: nn.Linear) -> Iterator[WeightSlot]:
        """The tensors of the layer's first GEMM. Rows with RoPE are read as pairs are here."""
        latent, rope = range(self.sizes.kv_lora_rank), self._config.rotary.head_rows
        row = (latent, *shifted(rope, len(latent)))
        prefix = f"{prefix}.self_attn"
        for kind, parameter in first.named_parameters():
            widths = (self.first_width, self.sizes.row_dim)
            query, compressed = parameter.detach().split(widths)
            if self.query_proj is None:
                yield WeightSlot(f"{prefix}.q_proj.{kind}", query, query.shape, roles=("query",))
            else:
                yield WeightSlot(f"{prefix}.q_a_proj.{kind}", query, query.shape)
            name = f"{prefix}.kv_a_proj_with_mqa.{kind}"
            yield WeightSlot(name, compressed, compressed.shape, parts=row)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensors of this module by their checkpoint names."""
        prefix = f"{prefix}.self_attn"
        up = self.up.detach().flatten(0, 1)
        yield WeightSlot(f"{prefix}.kv_b_proj.weight", up, up.shape, roles=("latent",))
        norm = self.kv_norm.weight.detach()
        yield WeightSlot(f"{prefix}.kv_a_layernorm.weight", norm, norm.shape)
        if self.query_proj is not None and self.query_norm is not None:
            weight, norm = self.query_proj.weight.detach(), self.query_norm.weight.detach()
            name = f"{prefix}.q_b_proj.weight"
            yield WeightSlot(name, weight, weight.shape, roles=("query",))
            yield WeightSlot(f"{prefix}.q_a_layernorm.weight", norm, norm.shape)
