"""The kernels of a layer in a batch with adapters: those of another strategy, and LoRA's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ostinato.models.native.fused_kernels import PendingNorm, SmallM
from ostinato.models.native.layer_kernels import (
    AnyKernels,
    AnyNorm,
    AttentionLayer,
    LatentWeights,
    LayerKernels,
    Linear,
)
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.ops.activation import Activation, activate_and_mul
from ostinato.ops.gemm.lora import LoraRows, LoraWeights, expand, expand_gated, shrink
from ostinato.ops.gemm.lora_linear import lora_linear

AdaptedLinears = Mapping[int, LoraWeights]  # by the linear's id


def with_adapters(run: AnyKernels, weights: AdaptedLinears, rows: LoraRows) -> AnyKernels:
    """``run``, with the adapters of ``rows`` in every GEMM."""
    if isinstance(run, SmallM):
        return SmallMWithAdapters(run, weights, rows)
    return WithAdapters(run, weights, rows)


class SmallMWithAdapters(SmallM):
    """``SmallM`` whose GEMMs add the adapters themselves, so that all that it fuses stays fused."""

    def __init__(self, run: SmallM, weights: AdaptedLinears, rows: LoraRows) -> None:
        super().__init__(run._tables, run._positions)
        self.slots = run.slots
        self._weights = weights
        self._rows = rows

    def gemm(
        self,
        projection: Linear,
        x: PendingNorm | Tensor,
        *,
        gate: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        operands = self.operands(projection, x, gate, residual)
        return lora_linear(operands, self._weights[id(projection)], self._rows)


class WithAdapters(LayerKernels[Tensor, Tensor]):
    """``run``, with the adapters added after every GEMM.

    An adapter reads a GEMM's normed input and adds to its raw result, so the GEMM itself fuses
    neither activations nor residuals here.
    """

    def __init__(self, run: AnyKernels, weights: AdaptedLinears, rows: LoraRows) -> None:
        self._run = run
        self._weights = weights
        self._rows = rows

    def norm(
        self, norm: AnyNorm | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self._run.norm(norm, x, residual)
        assert residual is not None
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

    def experts(self, experts: MixtureOfExperts, x: Tensor, shared: Tensor | None) -> Tensor:
        return self._run.add(self._run.experts(experts, x, shared), None)

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        return self._run.attend(layer, qkv)

    def attend_latent(
        self,
        layer: AttentionLayer,
        latent: LatentWeights,
        query: Tensor,
        compressed: Tensor,
    ) -> Tensor:
        return self._run.attend_latent(layer, latent, query, compressed)

    def finish(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor | None]:
        return self._run.finish(x, residual)

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        total: Any = self._run.add(x, residual)
        assert isinstance(total, Tensor)
        return total
