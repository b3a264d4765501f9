"""The strategies that choose the kernels of a layer, for the one body of ``DecoderLayer``.

A fusion across two lines of the body is a value. ``norm`` may return a pending norm that the next
GEMM applies; ``output`` may return a pending GEMM that adds the residual, or the partial sums of a
split-K GEMM, which the next ``norm`` adds up. Each strategy consumes its own values, so the body
never inspects them. A strategy serves one forward: it holds the batch's positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F

from ostinato.attention.base import attend, attend_qkv
from ostinato.attention.rope import RotaryEmbedding, angles_at, rotate
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.models.native.rms_norm import RMSNorm
from ostinato.ops.activation import Activation, activate, activate_and_mul
from ostinato.ops.expert_kernels import RoutedToken, down_row, expert_parts, gate_up_row
from ostinato.ops.experts import run_experts
from ostinato.ops.linear import Norm, linear
from ostinato.ops.norm import add_rms_norm, rms_norm
from ostinato.ops.split_k import split_k_gemm

if TYPE_CHECKING:
    from ostinato.models.native.layer import DecoderLayer

Tensor = torch.Tensor
Normed = TypeVar("Normed")  # what a sublayer reads
Delta = TypeVar("Delta")  # what a sublayer adds to the residual


class Linear(Protocol):
    """A linear module, or views of one."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class LayerKernels(ABC, Generic[Normed, Delta]):
    """The operations of a layer. ``residual`` is the stream that sublayers add to."""

    # The source of keys and values, in layers that do not compute them from their input (SwiftKV).
    source: Tensor | None = None
    # Of the tokens, negative for padding, in models with experts; None: there is no padding.
    slots: Tensor | None = None

    @abstractmethod
    def norm(
        self, norm: RMSNorm | None, x: Delta | Tensor, residual: Tensor | None
    ) -> tuple[Normed | Tensor, Tensor]:
        """The norm of ``residual + x``, and the sum; ``residual`` None: ``x`` is all of it.

        ``norm`` None: the sum, and the sum.
        """

    @abstractmethod
    def output_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The norm of a projection's result, or of some columns of it."""

    @abstractmethod
    def project(self, projection: Linear, x: Normed | Tensor) -> Tensor:
        """``x @ weight.T + bias``."""

    @abstractmethod
    def gated(self, projection: Linear, x: Normed, activation: Activation) -> Tensor:
        """``activation`` of the projection's first half, times the second half."""

    @abstractmethod
    def output(self, projection: Linear, x: Tensor) -> Delta:
        """``project`` for a result that goes to ``norm`` or ``add``, summed over ranks."""

    @abstractmethod
    def experts(self, experts: MixtureOfExperts, x: Normed, shared: Tensor | None) -> Delta:
        """The output of the experts chosen for each row, plus that of a ``shared`` expert.

        Padding chooses none.
        """

    @abstractmethod
    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """RoPE and attention: ``qkv`` [T, all heads * head_dim] -> [T, num_heads * head_dim]."""

    @abstractmethod
    def add(self, x: Delta | Tensor, residual: Tensor | None) -> Tensor:
        """The sum of both."""

    def finish(
        self, x: Delta | Tensor, residual: Tensor | None
    ) -> tuple[Delta | Tensor, Tensor | None]:
        """The same after a layer, in a form that needs none of the layer's weights any more."""
        return x, residual


class Plain(LayerKernels[Tensor, Tensor]):
    """Plain torch operators: the reference, and the code that torch.compile sees.

    ``positions`` belong to the rows that the layer computes.
    """

    def __init__(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        self._angles = angles_at(table, positions, dtype)

    def norm(
        self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual = self.add(x, residual)
        return (residual if norm is None else norm(residual)), residual

    def output_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        normed: Tensor = norm(x)
        return normed

    def project(self, projection: Linear, x: Tensor) -> Tensor:
        return F.linear(x, projection.weight, projection.bias)

    def gated(self, projection: Linear, x: Tensor, activation: Activation) -> Tensor:
        gate, up = self.project(projection, x).chunk(2, dim=-1)
        return activate(gate, activation) * up

    def output(self, projection: Linear, x: Tensor) -> Tensor:
        return self.project(projection, x)

    def experts(self, experts: MixtureOfExperts, x: Tensor, shared: Tensor | None) -> Tensor:
        return _with(shared, run_experts(x, experts.weights, self.slots))

    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        num_heads, num_kv_heads = layer.head_counts
        heads = qkv.unflatten(-1, (-1, layer.spec.head_dim))
        queries_keys, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        query, key = self.rotated(layer, queries_keys).split(layer.head_counts, dim=1)
        query, key, value = layer.exchange.tokens_for_heads(query, key, value)
        mixed = attend(layer.spec, query, key, value, layer.sinks)
        return layer.exchange.heads_for_tokens(mixed).flatten(1)

    def rotated(self, layer: DecoderLayer, heads: Tensor, which: slice | None = None) -> Tensor:
        """Apply the norm, if any, and RoPE to ``heads``.

        ``which`` of the queries and keys they are; None: all.
        """
        if layer.qk_norm is not None:
            heads = layer.qk_norm(heads, which)
        return rotate(heads, *self._angles)

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if residual is None else residual + x


class _Fused(LayerKernels[Normed, Delta]):
    """Attention from the raw QKV GEMM, RoPE included.

    ``positions`` belong to all tokens that attention sees, even if they are split over ranks.
    """

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self._table = table
        self._positions = positions

    def output_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        (num_heads, _), spec = layer.head_counts, layer.spec
        qkv = layer.exchange.qkv_for_heads(qkv, *layer.head_counts)
        qk_norm: Tensor | None = None if layer.qk_norm is None else layer.qk_norm.weight
        if qk_norm is not None and spec.num_heads < num_heads:
            # Attention has some of these heads. One weight serves all queries, and one all keys.
            qk_norm = qk_norm[num_heads - spec.num_heads : num_heads + spec.num_kv_heads]
        rotary = RotaryEmbedding(table=self._table, qk_norm=qk_norm, eps=layer.rms_norm_eps)
        mixed = attend_qkv(spec, qkv, rotary, self._positions, layer.sinks)
        return layer.exchange.heads_for_tokens(mixed).flatten(1)


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


Pending = PendingGemm | PendingExperts | Tensor


class SmallM(_Fused[PendingNorm | Tensor, Pending]):
    """For small-M decode steps: norms, SwiGLU and residuals are fused into the GEMMs.

    Five operators a layer. ``linear`` uses torch operators for cases that a GEMM cannot fuse (large
    M, other devices). Experts of several rows give parts [P, T, N], added up by the next norm.
    """

    def norm(
        self, norm: RMSNorm | None, x: Pending, residual: Tensor | None
    ) -> tuple[PendingNorm | Tensor, Tensor]:
        if norm is not None and residual is not None and isinstance(x, Tensor):
            # A result summed over ranks, normed or scaled cannot be added inside the GEMM.
            return add_rms_norm(x, residual, norm.weight, norm.eps)
        residual = self.add(x, residual)
        if norm is None:
            return residual, residual
        return PendingNorm(residual, Norm(norm.weight, norm.eps)), residual

    def gemm(
        self,
        projection: Linear,
        x: PendingNorm | Tensor,
        *,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The projection with what is fused into it: all GEMMs of a layer come here."""
        rows, norm = x if isinstance(x, PendingNorm) else (x, None)
        weight, bias = projection.weight, projection.bias
        return linear(rows, weight, bias, norm=norm, gated=gated, residual=residual)

    def project(self, projection: Linear, x: PendingNorm | Tensor) -> Tensor:
        return self.gemm(projection, x)

    def gated(self, projection: Linear, x: PendingNorm | Tensor, activation: Activation) -> Tensor:
        if activation != "silu":
            return activate_and_mul(self.project(projection, x), activation)
        return self.gemm(projection, x, gated=True)

    def output(self, projection: Linear, x: Tensor) -> PendingGemm:
        return PendingGemm(projection, x)

    def experts(
        self, experts: MixtureOfExperts, x: PendingNorm | Tensor, shared: Tensor | None
    ) -> Pending:
        rows, norm = x if isinstance(x, PendingNorm) else (x, None)
        if not rows.is_cuda:
            rows = rows if norm is None else rms_norm(rows, norm.weight, norm.eps)
            return _with(shared, run_experts(rows, experts.weights, self.slots))
        if rows.shape[0] == 1:
            token = gate_up_row(rows, experts.weights, self.slots, norm)
            return PendingExperts(token, shared)
        return expert_parts(rows, experts.weights, self.slots, norm, shared)

    def finish(self, x: Pending, residual: Tensor | None) -> tuple[Pending, Tensor | None]:
        return (x, residual) if isinstance(x, Tensor) else (self.add(x, residual), None)

    def add(self, x: Pending, residual: Tensor | None) -> Tensor:
        if isinstance(x, PendingGemm):
            return self.gemm(x.projection, x.x, residual=residual)
        if isinstance(x, PendingExperts):
            if residual is not None and x.shared is not None:
                return down_row(x.token, residual + x.shared)
            return down_row(x.token, residual if x.shared is None else x.shared)
        return _added(x, residual)


class LargeM(_Fused[Tensor, Tensor]):
    """For large M: torch's GEMMs, and small operators between them.

    A GEMM too small to fill the GPU is split-K: [P, T, N], added up by the next norm.
    """

    def norm(
        self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if norm is None:
            residual = self.add(x, residual)
            return residual, residual
        if residual is None:
            return rms_norm(x, norm.weight, norm.eps), x
        return add_rms_norm(x, residual, norm.weight, norm.eps)

    def project(self, projection: Linear, x: Tensor) -> Tensor:
        return F.linear(x, projection.weight, projection.bias)

    def gated(self, projection: Linear, x: Tensor, activation: Activation) -> Tensor:
        return activate_and_mul(self.project(projection, x), activation)

    def output(self, projection: Linear, x: Tensor) -> Tensor:
        if projection.bias is not None:
            return self.project(projection, x)
        return split_k_gemm(x, projection.weight)

    def experts(self, experts: MixtureOfExperts, x: Tensor, shared: Tensor | None) -> Tensor:
        if x.is_cuda:
            return expert_parts(x, experts.weights, self.slots, None, shared)
        return _with(shared, run_experts(x, experts.weights, self.slots))

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return _added(x, residual)


def _with(shared: Tensor | None, x: Tensor) -> Tensor:
    return x if shared is None else x + shared


def _added(x: Tensor, residual: Tensor | None) -> Tensor:
    """``x``, or the sum of its parts [P, T, N], plus ``residual``."""
    x = x.sum(0) if x.dim() > 2 else x
    return x if residual is None else residual + x


AnyKernels = LayerKernels[Any, Any]


class Adapters(Protocol):
    """Adapters of a decoder's linears, for some rows of a batch."""

    def adapted(self, run: AnyKernels, num_rows: int) -> AnyKernels:
        """The kernels of the running batch: ``run`` itself if none of its rows has an adapter."""
