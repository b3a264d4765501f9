"""The shapes of a decoder's small-M GEMMs, with what ``SmallM`` fuses into each."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.layer import DecoderLayer
from ostinato.ops.gemm.tile_config import ROW_CLASSES, LinearShape


def tunable_gemms(
    config: DecoderConfig, layers: Iterable[DecoderLayer], head: torch.Tensor
) -> dict[LinearShape, list[torch.Tensor]]:
    """``CausalLM.tunable_gemms`` of ``layers`` and a ``head``."""
    kinds: dict[LinearShape, list[torch.Tensor]] = {}

    def add(
        weight: torch.Tensor, *, norm: bool = False, gated: bool = False, residual: bool = False
    ) -> None:
        n, k = weight.shape
        for num_rows in ROW_CLASSES:
            shape = LinearShape(num_rows, n, k, weight.dtype, norm, gated, residual)
            kinds.setdefault(shape, []).append(weight)

    # A norm after a sublayer, or a scale, prevents fusing the residual; a LayerNorm is a kernel of
    # its own.
    names = config.names
    pre_norm = names.attention_norm is not None and names.attention_output_norm is None
    fused = pre_norm and config.residual_scale == 1.0
    for layer in layers:
        add(layer.qkv_proj.weight, norm=fused and not config.layer_norm)
        if layer.latent is not None and layer.latent.query_proj is not None:
            add(layer.latent.query_proj.weight)
        add(layer.o_proj.weight, residual=fused)
        if layer.mixture is None:  # the GEMMs of experts have other kernels
            norm = fused and not config.layer_norm
            add(layer.gate_up_proj.weight, norm=norm, gated=config.gated)
            add(layer.down_proj.weight, residual=fused)
    add(head, norm=not config.layer_norm)
    return kinds
