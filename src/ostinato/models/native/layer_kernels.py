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
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.attention.base import AttentionSpec, attend
from ostinato.attention.latent_rope import absorbed_query, to_values
from ostinato.attention.rope import angles_at, rotate
from ostinato.models.base import Adapters
from ostinato.models.native.config.latent_config import LatentConfig
from ostinato.models.native.exchange import Exchange
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.models.native.norms.layer_norm import LayerNorm
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.ops.activation import Activation, activate
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.experts.own_experts import run_own_experts

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


class AttentionLayer(Protocol):
    """What attention reads of a layer."""

    spec: AttentionSpec
    head_counts: tuple[int, int]  # of queries and of keys, as the QKV GEMM computes them
    rotary_table: int  # the number of its RoPE table
    qk_norm: RMSNorm | None  # of each head: one row per query head, then one per key head
    rms_norm_eps: float
    exchange: Exchange

    @property
    def own_sinks(self) -> Tensor | None:
        """The sinks of the heads that attention has on this rank."""


class LatentWeights(Protocol):
    """What the kernels read of a layer's latent attention."""

    sizes: LatentConfig
    kv_norm: RMSNorm
    up: nn.Parameter  # [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]


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
        return with_shared(shared, parts.sum(0))

    @abstractmethod
    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """RoPE and attention: ``qkv`` [T, all heads * head_dim] -> [T, num_heads * head_dim]."""

    @abstractmethod
    def attend_latent(
        self,
        layer: AttentionLayer,
        latent: LatentWeights,
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
        return with_shared(shared, run_experts(x, experts.weights, self.slots))

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        num_heads, num_kv_heads = layer.head_counts
        heads = qkv.unflatten(-1, (-1, layer.spec.head_dim))
        queries_keys, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        query, key = self.rotated(layer, queries_keys).split(layer.head_counts, dim=1)
        query, key, value = layer.exchange.tokens_for_heads(query, key, value)
        mixed = attend(layer.spec, query, key, value, layer.own_sinks)
        return layer.exchange.heads_for_tokens(mixed).flatten(1)

    def attend_latent(
        self,
        layer: AttentionLayer,
        latent: LatentWeights,
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

    def rotated(self, layer: AttentionLayer, heads: Tensor, which: slice | None = None) -> Tensor:
        """Apply the norm, if any, and RoPE to ``heads``.

        ``which`` of the queries and keys they are; None: all.
        """
        if layer.qk_norm is not None:
            heads = layer.qk_norm(heads, which)
        return rotate(heads, *self._angles[layer.rotary_table])

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if residual is None else residual + x


def with_shared(shared: Tensor | None, x: Tensor) -> Tensor:
    """The output of experts, plus that of a ``shared`` expert, if there is one."""
    return x if shared is None else x + shared


AnyKernels = LayerKernels[Any, Any]


class LayerAdapters(Adapters, Protocol):
    """Adapters that change the kernels of a layer."""

    def adapted(self, run: AnyKernels, num_rows: int) -> AnyKernels:
        """The kernels of the running batch: ``run`` itself if none of its rows has an adapter."""
