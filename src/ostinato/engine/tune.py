"""Measuring, once per GPU and shape, how a model's matrix products of few rows are best cut up.

What is found is written to the user's cache, and later starts use it. Shapes that are known, from
there or from the table that is shipped, are not measured again.
"""

from __future__ import annotations

import torch

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.native.decoder import Decoder
from ostinato.ops.tuning import ROW_CLASSES, LinearShape, tune_linears, tuning
from ostinato.runner import startup


def tune(config: EngineConfig) -> dict[str, str]:
    """Measure what is not known yet for this model; the choice for each of its products."""
    device = config.torch_device()
    if device.type != "cuda":
        raise ConfigError(f"there is nothing to tune on {device}: kernels are chosen for CUDA GPUs")
    model = startup.load(config).model
    if not isinstance(model, Decoder):
        raise ConfigError(
            "only models that run on the native decoder have kernels to tune; this one runs "
            "through transformers' own modules"
        )
    if model.dtype is torch.float32:
        raise ConfigError("there is nothing to tune in float32; use bfloat16 or float16")
    weights = linear_weights(model)
    tune_linears(weights, weights.__getitem__)
    gpu = torch.cuda.get_device_name(device)
    return {(key := shape.key(gpu)): str(tuning().get(key)) for shape in weights}


def linear_weights(model: Decoder) -> dict[LinearShape, list[torch.Tensor]]:
    """The weights of every kind of product that a decode step of few rows makes."""
    kinds: dict[LinearShape, list[torch.Tensor]] = {}

    def add(
        weight: torch.Tensor, *, norm: bool = False, gated: bool = False, residual: bool = False
    ) -> None:
        n, k = weight.shape
        for num_rows in ROW_CLASSES:
            shape = LinearShape(num_rows, n, k, model.dtype, norm, gated, residual)
            kinds.setdefault(shape, []).append(weight)

    # As ``SmallM`` fuses them. A norm behind a sublayer, or a scale, stands between GEMM and sum.
    config, names = model.config, model.config.names
    pre_norm = names.attention_norm is not None and names.attention_output_norm is None
    fused = pre_norm and config.residual_scale == 1.0
    for layer in model.decoder_layers():
        add(layer.qkv_proj.weight, norm=fused)
        add(layer.o_proj.weight, residual=fused)
        add(layer.gate_up_proj.weight, norm=fused, gated=config.activation == "silu")
        add(layer.down_proj.weight, residual=fused)
    add(model.head_weight, norm=config.norm_offset == 0.0)
    return kinds
