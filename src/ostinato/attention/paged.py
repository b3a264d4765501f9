"""What backends over the paged cache share: one layer's batch, and operator schemas.

An operator takes plain values, so a ``PagedBatch`` is passed to it field by field, behind the
queries, keys and values, behind the raw QKV and its RoPE, or behind the inputs of latent attention.
Here it is taken apart and put together again; kernels take it whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.rope import RotaryEmbedding
from ostinato.ops.norm import Norm

T = TypeVar("T")


class PagedBatch(NamedTuple):
    """One batch for one layer: its cache, where results go, and what is fixed about the scores.

    ``AttentionSpec``, ``AttentionMetadata`` and ``AttentionBackend.forward`` describe the fields.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None
    max_seq_len: int
    uniform_decode: bool

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> PagedBatch:
        key_cache, value_cache = metadata.kv_caches[spec.layer]
        return cls(
            key_cache,
            value_cache,
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            sinks,
            spec.scale,
            spec.window,
            spec.soft_cap,
            metadata.max_seq_len,
            metadata.uniform_decode,
        )

    @property
    def values_in_keys(self) -> bool:
        """As the spec says: the value cache is a view of the key cache."""
        return self.value_cache.data_ptr() == self.key_cache.data_ptr()

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the softmax of the scaled scores, and nothing else."""
        return self.soft_cap is None and self.sinks is None


_BATCH = """Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) out,
    Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor slot_mapping,
    Tensor? sinks, float scale, int? window, float? soft_cap,
    int max_seq_len, bool uniform_decode"""


def batch_schema() -> str:
    """The fields of a ``PagedBatch``, as the last arguments of an operator."""
    return _BATCH


def heads_schema(name: str) -> str:
    """Of an operator whose kernel, ``over_heads(kernel)``, takes queries, keys and values."""
    return f"{name}(Tensor query, Tensor key, Tensor value, {_BATCH}) -> ()"


def qkv_schema(name: str) -> str:
    """Of an operator whose kernel, ``over_qkv(kernel)``, takes the raw QKV."""
    rotary = "Tensor table, Tensor? qk_norm, float eps"
    return f"{name}(Tensor qkv, Tensor positions, {rotary}, {_BATCH}) -> ()"


def latent_schema(name: str) -> str:
    """Of an operator whose kernel, ``over_latent(kernel)``, takes latent attention's inputs."""
    inputs = "Tensor query, Tensor compressed, Tensor positions"
    embedding = "Tensor table, Tensor norm, float eps, Tensor up"
    return f"{name}({inputs}, {embedding}, {_BATCH}) -> ()"


def over_heads(
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch], T],
) -> Callable[..., T]:
    """``kernel(query, key, value, batch)`` by the operator's arguments."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *batch: Any) -> T:
        return kernel(query, key, value, PagedBatch(*batch))

    return run


def over_qkv(
    kernel: Callable[[torch.Tensor, torch.Tensor, RotaryEmbedding, PagedBatch], T],
) -> Callable[..., T]:
    """``kernel(qkv, positions, rotary, batch)`` by the operator's arguments."""

    def run(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        *batch: Any,
    ) -> T:
        rotary = RotaryEmbedding(table=table, qk_norm=qk_norm, eps=eps)
        return kernel(qkv, positions, rotary, PagedBatch(*batch))

    return run


def over_latent(
    kernel: Callable[[torch.Tensor, torch.Tensor, LatentEmbedding, torch.Tensor, PagedBatch], T],
) -> Callable[..., T]:
    """``kernel(query, compressed, embedding, positions, batch)`` likewise."""

    def run(
        query: torch.Tensor,
        compressed: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        up: torch.Tensor,
        *batch: Any,
    ) -> T:
        embedding = LatentEmbedding(table=table, norm=Norm(norm, eps), up=up)
        return kernel(query, compressed, embedding, positions, PagedBatch(*batch))

    return run


class PagedAttention(AttentionBackend):
    """An ``AttentionBackend`` whose work is defined on a ``PagedBatch``."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        """``forward``; gradients are off."""

    @torch.no_grad()  # otherwise the cache would hold the autograd history of every step
    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.attend(query, key, value, PagedBatch.of(spec, metadata, out, sinks))


class PagedQkvAttention(PagedAttention):
    """A ``PagedAttention`` that applies RoPE itself, in fewer kernels."""

    @abstractmethod
    def attend_qkv(
        self, qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
    ) -> None:
        """``forward_qkv``; gradients are off."""

    @torch.no_grad()
    def forward_qkv(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        rotary: RotaryEmbedding,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.attend_qkv(qkv, positions, rotary, PagedBatch.of(spec, metadata, out, sinks))
