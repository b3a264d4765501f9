"""Measures the best tile configs for a model's small-M GEMMs, once per GPU and shape.

The results go to the user's cache, which later starts read. Shapes of the shipped table are not
measured. ``ostinato tune`` measures all others thoroughly, also again; a start with ``tune="auto"``
compares fewer configs, of large GEMMs of up to 16 rows that are not in the cache, and takes a few
seconds.
"""

from __future__ import annotations

import logging

import torch

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.base import CausalLM
from ostinato.ops.gemm.linear import has_kernels
from ostinato.ops.gemm.tile_config import gpu_of, row_class
from ostinato.ops.gemm.tune_linears import tune_linears
from ostinato.ops.gemm.tuning import tuning
from ostinato.ops.triton.launch import is_interpreted
from ostinato.runner import startup

logger = logging.getLogger(__name__)

_LARGE = 4 << 20  # bytes of a weight; the launch is what smaller GEMMs cost
_QUICK = 3  # tile configs
_QUICK_ROWS = 16  # with more, the prediction has been as good


def tune(config: EngineConfig) -> dict[str, str]:
    """Measure shapes of this model that are not shipped; return the choice for each GEMM."""
    device = config.torch_device()
    if device.type != "cuda":
        raise ConfigError(f"there is nothing to tune on {device}: only CUDA kernels are tuned")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"there is nothing to tune with tensor_parallel_size {config.tensor_parallel_size}: "
            "GEMMs whose results are summed over ranks run in torch"
        )
    model = startup.load(config).model
    weights = model.tunable_gemms()
    if not weights:
        raise ConfigError(
            "only models that run on the native decoder have kernels to tune; this one runs "
            "through transformers' modules"
        )
    if model.dtype is torch.float32:
        raise ConfigError("there is nothing to tune in float32; use bfloat16 or float16")
    if not has_kernels(model.device, model.dtype):
        raise ConfigError(
            "there is nothing to tune: Ostinato's kernels need Triton and a GPU of compute "
            "capability 8.0 or more"
        )
    if is_interpreted():
        raise ConfigError(
            "there is nothing to tune where kernels are interpreted; unset TRITON_INTERPRET"
        )
    gpu = gpu_of(model.device)
    tune_linears(weights, gpu=gpu, again=True, show_progress=config.show_progress)
    return {(key := shape.key(gpu.name)): str(tuning().get(key)) for shape in weights}


def tune_at_start(config: EngineConfig, model: CausalLM) -> None:
    """Measure what start-up should know about the GEMMs of ``model``, if it can be measured here.

    If that fails, a warning says so, and tile configs are predicted.

    Not on several ranks: a rank that measured something else would round differently. They use
    what is known, and for ranks that split tokens ``ostinato tune`` can measure it before.
    """
    if config.tune != "auto" or config.world_size > 1:
        return
    if not has_kernels(model.device, model.dtype):
        return
    if is_interpreted():  # the interpreter's times say nothing
        return
    gemms = model.tunable_gemms()
    if not gemms:
        return
    most_rows = row_class(min(config.batch_limits(model.device)[0], _QUICK_ROWS))
    large = {
        shape: weights
        for shape, weights in gemms.items()
        if shape.num_rows <= most_rows and weights[0].nbytes >= _LARGE
    }
    try:
        tune_linears(
            large,
            gpu=gpu_of(model.device),
            num_candidates=_QUICK,
            show_progress=config.show_progress,
        )
    except Exception as error:
        logger.warning(
            "tile configs are predicted, because measuring GEMMs failed (%s: %s)",
            type(error).__name__,
            error,
        )
