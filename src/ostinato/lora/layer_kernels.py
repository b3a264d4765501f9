"""The kernels of a layer in a batch with adapters: those of another strategy, and LoRA's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ostinato.models.native.layer_kernels import (
    AnyKernels,
    AnyNorm,
    LayerKernels,
    Linear,
    PendingNorm,
)
from ostinato.ops.activation import Activation, activate_and_mul
from ostinato.ops.lora import LoraRows, LoraWeights, expand, expand_gated, shrink
from ostinato.ops.norm import rms_norm

if TYPE_CHECKING:
    from ostinato.models.native.layer import DecoderLayer


class WithAdapters(LayerKernels[Tensor, Tensor]):
    """``run``, with the adapters of ``rows`` added to every GEMM; ``weights`` by the linear's id.

    An adapter reads a GEMM's normed input and adds to its raw result, so the GEMM itself fuses
    neither norms nor activations nor residuals here.
    """

    def __init__(self, run: AnyKernels, weights: Mapping[int, LoraWeights], rows: LoraRows) -> None:
        self._run = run
        self._weights = weights
        self._rows = rows

    def norm(
        self, norm: AnyNorm | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self._run.norm(norm, x, residual)
        if isinstance(normed, PendingNorm):
            normed = rms_norm(normed.x, normed.norm.weight, normed.norm.eps)
        return normed, residual

    def output_norm(self, norm: AnyNorm, x: Tensor) -> Tensor:
        return self._run.output_norm(norm, x)

    def delta_norm(self, norm: AnyNorm, x: Tensor) -> Any:
        return self._run.delta_norm(norm, x)

    def project(self, projection: Linear, x: Tensor) -> Tensor:
        weights = self._weights[id(projection)]
        small = shrink(x, weights, self._rows)
        y = self._run.project(projection, x)
        expand(y, small, weights, self._rows)
        return y

    def gated(self, projection: Linear, x: Tensor, activation: Activation) -> Tensor:
        if activation != "silu":
            return activate_and_mul(self.project(projection, x), activation)
        weights = self._weights[id(projection)]
        small = shrink(x, weights, self._rows)
        return expand_gated(self._run.project(projection, x), small, weights, self._rows)

    def output(self, projection: Linear, x: Tensor) -> Tensor:
        return self.project(projection, x)

    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        return self._run.attend(layer, qkv)

    def finish(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor | None]:
        return self._run.finish(x, residual)

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        total: Any = self._run.add(x, residual)
        assert isinstance(total, Tensor)
        return total
