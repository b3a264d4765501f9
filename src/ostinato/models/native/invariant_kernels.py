"""The strategy of batch-invariant models: no bit of a row depends on the other rows of its batch.

Every GEMM is ``invariant_linear``; norms and activations are computed row by row. Experts are
refused before a model gets here.
"""

from __future__ import annotations

import torch

from ostinato.models.native.fused_kernels import Pending, PendingGemm, PendingNorm, SmallM
from ostinato.models.native.layer_kernels import AnyNorm, Linear
from ostinato.ops.activation import Activation, activate
from ostinato.ops.gemm.invariant import each_row, invariant_linear

Tensor = torch.Tensor


class Invariant(SmallM):
    """For any number of rows: residuals and SwiGLU are fused into the GEMMs, norms are not."""

    def norm(
        self, norm: AnyNorm | None, x: Pending, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = self.add(x, residual)
        return (total if norm is None else self.output_norm(norm, total)), total

    def output_norm(self, norm: AnyNorm, x: Tensor) -> Tensor:
        return each_row(norm.fused, x)

    def delta_norm(self, norm: AnyNorm, x: Pending) -> Tensor:
        return self.output_norm(norm, self.add(x, None))

    def gemm(
        self,
        projection: Linear,
        x: PendingNorm | Tensor,
        *,
        gate: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return invariant_linear(self.operands(projection, x, gate, residual))

    def activated(
        self, projection: Linear, x: PendingNorm | Tensor, activation: Activation
    ) -> Tensor:
        return each_row(lambda rows: activate(rows, activation), self.project(projection, x))

    def add(self, x: Pending, residual: Tensor | None) -> Tensor:
        if isinstance(x, PendingGemm):
            return self.gemm(x.projection, x.x, residual=residual)
        assert isinstance(x, Tensor), "all other values are computed at once"
        return x if residual is None else residual + x
