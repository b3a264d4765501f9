"""The strategies that choose the kernels of a layer, for the one body of ``DecoderLayer``.

A fusion across two lines of the body is a value. ``norm`` may return a pending norm that the next
GEMM applies; ``output`` may return a pending GEMM that adds the residual, or the partial sums of a
split-K GEMM, which the next ``norm`` adds up; ``delta_norm`` a pending norm of these. Each strategy
consumes its own values, so the body never inspects them. A strategy serves one forward: it holds
the batch's positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F

from ostinato.attention.base import attend, attend_qkv
from ostinato.attention.latent import attend_latent
from ostinato.attention.latent_rope import LatentEmbedding, absorbed_query, to_values
from ostinato.attention.rope import RotaryEmbedding, angles_at, rotate
from ostinato.models.native.layer_norm import LayerNorm
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.models.native.rms_norm import RMSNorm
from ostinato.ops.activation import Activation, activate, activate_and_mul
from ostinato.ops.experts.expert_kernels import RoutedToken, down_row, expert_parts, gate_up_row
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.experts.own_experts import run_own_experts
from ostinato.ops.gemm.linear import Gemm, run_linear
from ostinato.ops.gemm.split_k import MOST_ROWS, split_k_gemm
from ostinato.ops.norm import Norm, add_output_norm, rms_norm

if TYPE_CHECKING:
    from ostinato.models.native.latent_attention import LatentAttention
    from ostinato.models.native.layer import DecoderLayer

Tensor = torch.Tensor
AnyNorm = RMSNorm | LayerNorm
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
        self, norm: AnyNorm | None, x: Delta | Tensor, residual: Tensor | None
    ) -> tuple[Normed | Tensor, Tensor]:
        """The norm of ``residual + x``, and the sum; ``residual`` None: ``x`` is all of it.

        ``norm`` None: the sum, and the sum.
        """

    @abstractmethod
    def output_norm(self, norm: AnyNorm, x: Tensor) -> Tensor:
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

    def activated(self, projection: Linear, x: Normed, activation: Activation) -> Tensor:
        """``activation`` of the projection, for an MLP without a gate."""
        return activate(self.project(projection, x), activation)

    def delta_norm(self, norm: AnyNorm, x: Delta | Tensor) -> Delta | Tensor:
        """The norm of what ``output`` returns, or of the same summed over ranks."""
        assert isinstance(x, Tensor), "strategies with other values have their own"
        return self.output_norm(norm, x)

    @abstractmethod
    def experts(self, experts: MixtureOfExperts, x: Normed, shared: Tensor | None) -> Delta:
        """The output of the experts chosen for each row, plus that of a ``shared`` expert.

        Padding chooses none.
        """

    def normed(self, x: Normed | Tensor) -> Tensor:
        """What a sublayer reads, computed: rows that other ranks can be sent."""
        assert isinstance(x, Tensor), "strategies with other values have their own"
        return x

    def own_experts(self, experts: MixtureOfExperts, x: Tensor) -> Tensor:
        """What this rank's experts add to rows ``x`` of all ranks, which ``slots`` belong to."""
        return run_own_experts(x, experts.weights, self.slots)

    def total(self, parts: Tensor, shared: Tensor | None) -> Delta | Tensor:
        """The sum of ``parts`` [P, T, N] and of the output of a ``shared`` expert."""
        return _with(shared, parts.sum(0))

    @abstractmethod
    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """RoPE and attention: ``qkv`` [T, all heads * head_dim] -> [T, num_heads * head_dim]."""

    @abstractmethod
    def attend_latent(
        self,
        layer: DecoderLayer,
        latent: LatentAttention,
        query: Tensor,
        compressed: Tensor,
    ) -> Tensor:
        """Norm, RoPE and latent attention -> [T, heads, v_head_dim].

        ``query`` [T, heads, query_dim] and ``compressed`` [T, row_dim], as GEMMs return them.
        """

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

    ``tables``: the model's RoPE tables. ``positions`` belong to the rows that the layer computes.
    """

    def __init__(self, tables: Sequence[Tensor], positions: Tensor, dtype: torch.dtype) -> None:
        self._angles = [angles_at(table, positions, dtype) for table in tables]

    def norm(
        self, norm: AnyNorm | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual = self.add(x, residual)
        return (residual if norm is None else norm(residual)), residual

    def output_norm(self, norm: AnyNorm, x: Tensor) -> Tensor:
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
        mixed = attend(layer.spec, query, key, value, layer.own_sinks)
        return layer.exchange.heads_for_tokens(mixed).flatten(1)

    def attend_latent(
        self,
        layer: DecoderLayer,
        latent: LatentAttention,
        query: Tensor,
        compressed: Tensor,
    ) -> Tensor:
        rank, nope = latent.sizes.kv_lora_rank, latent.sizes.qk_nope_head_dim
        values, rope = latent.kv_norm(compressed[:, :rank]), compressed[:, None, rank:]
        key = torch.cat((values, self.rotated(layer, rope).squeeze(1)), dim=1)
        query = torch.cat((query[..., :nope], self.rotated(layer, query[..., nope:])), dim=2)
        query, key = layer.exchange.latent_for_heads(query, key)
        up, key = layer.exchange.own_heads(latent.up), key.unsqueeze(1)
        query = absorbed_query(query, up, latent.sizes.qk_rope_head_dim)
        mixed = attend(layer.spec, query, key, key[..., :rank])
        values = torch.bmm(mixed.transpose(0, 1), to_values(up, latent.sizes.v_head_dim))
        return layer.exchange.heads_for_tokens(values.transpose(0, 1).contiguous())

    def rotated(self, layer: DecoderLayer, heads: Tensor, which: slice | None = None) -> Tensor:
        """Apply the norm, if any, and RoPE to ``heads``.

        ``which`` of the queries and keys they are; None: all.
        """
        if layer.qk_norm is not None:
            heads = layer.qk_norm(heads, which)
        return rotate(heads, *self._angles[layer.rotary_table])

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if residual is None else residual + x


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

    def attend(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
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
        layer: DecoderLayer,
        latent: LatentAttention,
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
        if isinstance(norm, LayerNorm):  # its mean is no factor of the result
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
            return _with(shared, run_experts(rows, experts.weights, self.slots))
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
        return _with(shared, run_experts(x, experts.weights, self.slots))

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
