"""Strategies that fuse the lines of a layer into few operators: for small M and for large M.

What is fused across lines of the body is a value here: a pending norm, GEMM or sum, which the
strategy that made it consumes. See ``layer_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ostinato.attention.base import attend_qkv
from ostinato.attention.latent import attend_latent
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.rope import RotaryEmbedding
from ostinato.models.native.layer_kernels import (
    AnyNorm,
    AttentionLayer,
    Delta,
    LatentWeights,
    LayerKernels,
    Linear,
    Normed,
    with_shared,
)
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.models.native.norms.layer_norm import LayerNorm
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.ops.activation import Activation, activate_and_mul
from ostinato.ops.experts.expert_kernels import RoutedToken, down_row, expert_parts, gate_up_row
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.gemm.linear import Gemm, run_linear
from ostinato.ops.gemm.split_k import MOST_ROWS, split_k_gemm
from ostinato.ops.norm import Norm, add_output_norm, rms_norm

Tensor = torch.Tensor


class _Fused(LayerKernels[Normed, Delta]):
    """Attention from the raw QKV GEMM, RoPE included.

    ``tables``: the model's RoPE tables. ``positions`` belong to all tokens that attention sees,
    even if they are split over ranks.
    """

    def __init__(self, tables: Sequence[Tensor], positions: Tensor) -> None:
        self._tables = tables
        self._positions = positions

    def output_norm(self, norm: AnyNorm, x: Tensor) -> Tensor:
        return norm.fused(x)

    def total(self, parts: Tensor, shared: Tensor | None) -> Tensor:
        """As they are: the next norm adds parts up."""
        return parts if shared is None else torch.cat((parts, shared.unsqueeze(0)))

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        (num_heads, _), spec = layer.head_counts, layer.spec
        qkv = layer.exchange.qkv_for_heads(qkv, *layer.head_counts)
        qk_norm: Tensor | None = None if layer.qk_norm is None else layer.qk_norm.weight
        if qk_norm is not None and spec.num_heads < num_heads:
            # Attention has some of these heads. One weight serves all queries, and one all keys.
            qk_norm = qk_norm[num_heads - spec.num_heads : num_heads + spec.num_kv_heads]
        rotary = RotaryEmbedding(
            table=self._tables[layer.rotary_table], qk_norm=qk_norm, eps=layer.rms_norm_eps
        )
        mixed = attend_qkv(spec, qkv, rotary, self._positions, layer.own_sinks)
        return layer.exchange.heads_for_tokens(mixed).flatten(1)

    def attend_latent(
        self,
        layer: AttentionLayer,
        latent: LatentWeights,
        query: Tensor,
        compressed: Tensor,
    ) -> Tensor:
        query, compressed = layer.exchange.latent_for_heads(query, compressed)
        embedding = LatentEmbedding(
            table=self._tables[layer.rotary_table],
            norm=Norm(latent.kv_norm.weight, latent.kv_norm.eps),
            up=layer.exchange.own_heads(latent.up),
        )
        values = attend_latent(layer.spec, query, compressed, embedding, self._positions)
        return layer.exchange.heads_for_tokens(values)


class PendingNorm(NamedTuple):
    """The norm of ``x``, which the GEMM that reads it applies."""

    x: Tensor
    norm: Norm


class PendingGemm(NamedTuple):
    """A projection of ``x``, to be run where it is added to the residual."""

    projection: Linear
    x: Tensor


class PendingExperts(NamedTuple):
    """The last GEMM of one token's experts, to be run where it is added to the residual."""

    token: RoutedToken
    shared: Tensor | None


class PendingDeltaNorm(NamedTuple):
    """The norm of ``x``, to be applied where it is added to the residual."""

    x: Tensor  # or partial sums of it
    norm: RMSNorm

    def added(self, residual: Tensor | None, norm: AnyNorm | None) -> tuple[Tensor, Tensor]:
        """``norm`` of the residual with this added to it, and that sum."""
        assert residual is not None, "a sublayer has read a residual"
        after = Norm(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None
        own = Norm(self.norm.weight, self.norm.eps)
        normed, total = add_output_norm(self.x, residual, own, after)
        return (norm.fused(total) if isinstance(norm, LayerNorm) else normed), total


Pending = PendingGemm | PendingDeltaNorm | PendingExperts | Tensor


class SmallM(_Fused[PendingNorm | Tensor, Pending]):
    """For small-M decode steps: norms, SwiGLU and residuals are fused into the GEMMs.

    Five operators a layer. ``linear`` uses torch operators for cases that a GEMM cannot fuse (large
    M, other devices). Experts of several rows give parts [P, T, N], added up by the next norm.
    """

    def norm(
        self, norm: AnyNorm | None, x: Pending, residual: Tensor | None
    ) -> tuple[PendingNorm | Tensor, Tensor]:
        if isinstance(x, PendingDeltaNorm):
            return x.added(residual, norm)
        if norm is not None and residual is not None and isinstance(x, Tensor):
            # A result summed over ranks, normed or scaled cannot be added inside the GEMM.
            return norm.fused_add(x, residual)
        residual = self.add(x, residual)
        if norm is None:
            return residual, residual
        if isinstance(norm, LayerNorm):  # its mean is not a factor of the result
            return norm.fused(residual), residual
        return PendingNorm(residual, Norm(norm.weight, norm.eps)), residual

    def gemm(
        self,
        projection: Linear,
        x: PendingNorm | Tensor,
        *,
        gate: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The projection with what is fused into it: all GEMMs of a layer come here.

        ``gate``: the activation of the first half, by which the second is multiplied.
        """
        return run_linear(self.operands(projection, x, gate, residual))

    def operands(
        self,
        projection: Linear,
        x: PendingNorm | Tensor,
        gate: Activation | None,
        residual: Tensor | None,
    ) -> Gemm:
        rows, norm = x if isinstance(x, PendingNorm) else (x, None)
        weight, bias = projection.weight, projection.bias
        return Gemm(rows, weight, bias, norm, gate is not None, residual, gate or "silu")

    def project(self, projection: Linear, x: PendingNorm | Tensor) -> Tensor:
        return self.gemm(projection, x)

    def gated(self, projection: Linear, x: PendingNorm | Tensor, activation: Activation) -> Tensor:
        return self.gemm(projection, x, gate=activation)

    def output(self, projection: Linear, x: Tensor) -> PendingGemm:
        return PendingGemm(projection, x)

    def experts(
        self, experts: MixtureOfExperts, x: PendingNorm | Tensor, shared: Tensor | None
    ) -> Pending:
        rows, norm = x if isinstance(x, PendingNorm) else (x, None)
        if not rows.is_cuda:
            rows = rows if norm is None else rms_norm(rows, norm.weight, norm.eps)
            return with_shared(shared, run_experts(rows, experts.weights, self.slots))
        if rows.shape[0] == 1:
            token = gate_up_row(rows, experts.weights, self.slots, norm)
            return PendingExperts(token, shared)
        return expert_parts(rows, experts.weights, self.slots, norm, shared)

    def normed(self, x: PendingNorm | Tensor) -> Tensor:
        return x if isinstance(x, Tensor) else rms_norm(x.x, x.norm.weight, x.norm.eps)

    def delta_norm(self, norm: AnyNorm, x: Pending) -> PendingDeltaNorm | Tensor:
        rows = self.add(x, None)
        return PendingDeltaNorm(rows, norm) if isinstance(norm, RMSNorm) else norm.fused(rows)

    def finish(self, x: Pending, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x, residual) if isinstance(x, Tensor) else (self.add(x, residual), None)

    def add(self, x: Pending, residual: Tensor | None) -> Tensor:
        if isinstance(x, PendingDeltaNorm):
            return x.added(residual, None)[1]
        if isinstance(x, PendingGemm):
            return self.gemm(x.projection, x.x, residual=residual)
        if isinstance(x, PendingExperts):
            if residual is not None and x.shared is not None:
                return down_row(x.token, residual + x.shared)
            return down_row(x.token, residual if x.shared is None else x.shared)
        return _added(x, residual)


class LargeM(_Fused[Tensor, PendingGemm | PendingDeltaNorm | Tensor]):
    """For large M: torch's GEMMs, and small operators between them.

    A GEMM too small to fill the GPU is split-K: [P, T, N], added up by the next norm. A larger one
    adds to the residual itself, which saves a norm half of its traffic: 3% to 9% of both on an H200
    with 8,192 rows.
    """

    def __init__(self, tables: Sequence[Tensor], positions: Tensor) -> None:
        super().__init__(tables, positions)
        self._own: Tensor | None = None  # the residual, once nothing but the stream refers to it

    def norm(
        self,
        norm: AnyNorm | None,
        x: PendingGemm | PendingDeltaNorm | Tensor,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(x, PendingDeltaNorm):
            return x.added(residual, norm)
        if norm is None:
            residual = self.add(x, residual)  # twice: the next sublayer must not overwrite it
            return residual, residual
        if isinstance(x, PendingGemm):
            residual = self._accumulate(x, residual)
            return norm.fused(residual), residual
        if residual is None:
            return norm.fused(x), x
        normed, self._own = norm.fused_add(x, residual)  # a new sum, which a GEMM may add to
        return normed, self._own

    def project(self, projection: Linear, x: Tensor) -> Tensor:
        return F.linear(x, projection.weight, projection.bias)

    def gated(self, projection: Linear, x: Tensor, activation: Activation) -> Tensor:
        return activate_and_mul(self.project(projection, x), activation)

    def output(self, projection: Linear, x: Tensor) -> PendingGemm | Tensor:
        if projection.bias is not None:
            return self.project(projection, x)
        if x.shape[0] > MOST_ROWS:
            return PendingGemm(projection, x)
        return split_k_gemm(x, projection.weight)

    def experts(self, experts: MixtureOfExperts, x: Tensor, shared: Tensor | None) -> Tensor:
        if x.is_cuda:
            return expert_parts(x, experts.weights, self.slots, None, shared)
        return with_shared(shared, run_experts(x, experts.weights, self.slots))

    def delta_norm(
        self, norm: AnyNorm, x: PendingGemm | PendingDeltaNorm | Tensor
    ) -> PendingDeltaNorm | Tensor:
        assert not isinstance(x, PendingDeltaNorm), "it is normed once"
        x = self.project(x.projection, x.x) if isinstance(x, PendingGemm) else x
        if isinstance(norm, RMSNorm):
            return PendingDeltaNorm(x, norm)
        return norm.fused(x.sum(0) if x.dim() > 2 else x)

    def finish(
        self, x: PendingGemm | PendingDeltaNorm | Tensor, residual: Tensor | None
    ) -> tuple[PendingDeltaNorm | Tensor, Tensor | None]:
        return (x, residual) if isinstance(x, Tensor) else (self.add(x, residual), None)

    def add(self, x: PendingGemm | PendingDeltaNorm | Tensor, residual: Tensor | None) -> Tensor:
        if isinstance(x, PendingDeltaNorm):
            return x.added(residual, None)[1]
        if isinstance(x, PendingGemm):
            total = self._accumulate(x, residual)
            self._own = None  # the caller may keep it
            return total
        return _added(x, residual)

    def _accumulate(self, x: PendingGemm, residual: Tensor | None) -> Tensor:
        """The residual with the GEMM added to it: in place, if only the stream refers to it."""
        assert residual is not None, "a sublayer has read a residual"
        if residual is self._own:
            return residual.addmm_(x.x, x.projection.weight.mT)
        self._own = torch.addmm(residual, x.x, x.projection.weight.mT)
        return self._own


def _added(x: Tensor, residual: Tensor | None) -> Tensor:
    """``x``, or the sum of its parts [P, T, N], plus ``residual``."""
    x = x.sum(0) if x.dim() > 2 else x
    return x if residual is None else residual + x
