"""What attention is to the rest of the runtime: a spec per layer, metadata per batch, a backend.

A model's layers call ``attend``; it finds the batch in the forward context, so that it can be
called from inside third-party modules. The backend writes the new keys and values into the paged
cache and attends over it. Layers that have nothing but RoPE, and a norm before it, between their
QKV GEMM and attention call ``attend_qkv``, which leaves those to the backend too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from ostinato.attention.latent_rope import LatentEmbedding, absorbed_query, write_values
from ostinato.attention.rope import RotaryEmbedding
from ostinato.compile.operators import splitting_operator
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.graphs.tree import holds_no_tensors
from ostinato.recurrent.base import RecurrentBatch


@holds_no_tensors
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer: its index in the KV cache and what is fixed about its computation.

    ``layer`` is that index. ``num_heads`` query heads share ``num_kv_heads`` heads of keys,
    ``head_dim`` wide, and of values, ``value_dim`` wide. ``scale`` multiplies scores.

    A query at position p sees the keys at positions p - window + 1 to p (``window`` None: all up to
    p). ``soft_cap`` c turns scores s into c * tanh(s / c).

    ``values_in_keys``: values are the first ``value_dim`` columns of keys, as in latent attention,
    and have no memory of their own.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    values_in_keys: bool = False

    @property
    def cached_dim(self) -> int:
        """Elements in the cache for each token and KV head."""
        return self.head_dim if self.values_in_keys else self.head_dim + self.value_dim


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One batch as attention sees it; R requests, T tokens, both padded.

    ``query_start_loc`` [R + 1] int32: request r owns the tokens from entry r to entry r + 1.
    ``seq_lens`` [R] int32: keys of each request, this batch's tokens included; 0 for padding.
    ``block_table`` [R, blocks] int32. ``slot_mapping`` [T] int64: where each token's key and value
    go (block * block_size + offset), -1 for padding tokens, which are never written.
    ``max_seq_len`` is an upper limit known to the host. ``max_query_len`` describes the batch, but
    does not limit a graph: a graph of mixed batches is captured with equal query lengths, and
    replayed with any. ``uniform_decode``: request r has token r and no other, or none and no keys,
    in this batch and in every other that a graph of it is replayed with; as dispatch chose.

    ``dcp_local_seq_lens`` [R] int32: keys of each request that this rank stores, and
    ``slot_mapping`` is -1 for the others' tokens; None: this rank stores all.

    ``logits_indices`` [S] int64: the tokens whose hidden states will be read, each at most once;
    -1 for padding. None: all tokens. Models may skip the last layers of the others.

    ``kv_caches``: for each layer keys [num_blocks, block_size, num_kv_heads, head_dim], and values
    likewise; with ``values_in_keys``, values are a view of the keys. No request ever holds block 0.
    ``backend`` computes attention.

    ``recurrent``: the same batch for layers with a state per request; None if the model has none.

    The tensors may be read by graphs: a replay finds new contents at the same addresses.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    backend: AttentionBackend
    logits_indices: torch.Tensor | None = None
    uniform_decode: bool = False
    dcp_local_seq_lens: torch.Tensor | None = None
    recurrent: RecurrentBatch | None = None

    def __post_init__(self) -> None:
        num_reqs, num_tokens = self.seq_lens.shape[0], self.slot_mapping.shape[0]
        if self.uniform_decode and num_reqs != num_tokens:
            raise ConfigError(
                f"a decode batch has one token for each request, padding included, but this one "
                f"has {num_tokens} tokens and {num_reqs} requests; set uniform_decode=False"
            )


class AttentionBackend(Protocol):
    """Attention over the paged cache. Backends derive from it, for its defaults."""

    @property
    def name(self) -> str:
        """What logs and errors call it."""

    @property
    def support(self) -> AttentionCGSupport:
        """Which batches it can be captured for."""

    def pays_for_padding(self, device: torch.device) -> bool:
        """Whether room for more requests, or for longer ones, takes time even if it is not used.

        A graph of mixed batches has room for as many requests as tokens, up to the model's limit
        on their length. If that takes time on ``device``, attention is better left outside.
        """
        del device
        return False

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
        """Store ``key`` and ``value``, then attend and write all of ``out``.

        ``spec``: the layer's. ``metadata``: the batch, and the caches of all layers.
        ``query`` [T, num_heads, head_dim], ``key`` [T, num_kv_heads, head_dim], ``value`` [T,
        num_kv_heads, value_dim], ``out`` [T, num_heads, value_dim]. The inputs may be strided.
        Rows of tokens that belong to no request become zero. ``sinks`` [num_heads]: one more logit
        per head in the softmax, with no value.
        """

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
        """``rotary.apply``, then ``forward``; some backends override it with fewer kernels.

        ``qkv`` and ``positions`` are as in ``attend_qkv``; ``spec``, ``metadata``, ``out`` and
        ``sinks`` as in ``forward``.
        """
        query, key, value = rotary.apply(
            qkv, positions, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads
        )
        self.forward(spec, query, key, value, metadata, out, sinks)

    def forward_latent(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        compressed: torch.Tensor,
        embedding: LatentEmbedding,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """``embedding.apply``, then ``forward_absorbed``; others override it with fewer kernels.

        ``query``, ``compressed``, ``embedding`` and ``positions`` are as in ``attend_latent``;
        ``spec`` and ``metadata`` as in ``forward``; ``out`` [T, num_heads, v_head_dim] is dense.
        """
        query, row = embedding.apply(query, compressed, positions)
        self.forward_absorbed(spec, query, row, embedding.up, metadata, out)

    def forward_absorbed(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        row: torch.Tensor,
        up: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Latent attention over rows of the cache by ``forward``, with ``up`` absorbed.

        ``query`` and ``row`` are what ``LatentEmbedding.apply`` returns; ``spec`` and ``metadata``
        are as for ``forward``. Writes each head's values, ``up`` applied, to ``out``.
        """
        rank, key = spec.value_dim, row.unsqueeze(1)
        mixed = query.new_empty((*query.shape[:2], rank))
        absorbed = absorbed_query(query, up, spec.head_dim - rank)
        self.forward(spec, absorbed, key, key[..., :rank], metadata, mixed, None)
        write_values(mixed, up, out)


def attend(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer for the batch in the forward context -> [T, num_heads, value_dim].

    A piecewise graph breaks here: the segment before allocates the result, the eager call fills it,
    and the segment after reads it at the same address, without a copy.
    """
    out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
    if torch.compiler.is_compiling():
        values = [getattr(spec, name) for name in _FIELDS]
        _attend_operator(query, key, value, out, sinks, *values)
        return out
    _attend_into(spec, query, key, value, out, sinks)
    return out


@eager_break
def _attend_into(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    metadata.backend.forward(spec, query, key, value, metadata, out, sinks)


def attend_qkv(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend`` for the raw result of the QKV GEMM -> [T, num_heads, value_dim].

    ``qkv`` [T, (num_heads + 2 * num_kv_heads) * head_dim]: all query heads, all key heads, all
    value heads. ``positions`` [T] int64: rows of the RoPE table. A graph breaks here as it does at
    ``attend``. Not for code under torch.compile.
    """
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if qkv.shape[1] != width or spec.value_dim != spec.head_dim:
        raise ConfigError(
            f"attend_qkv got rows of {qkv.shape[1]} numbers, but {spec.num_heads} query heads, "
            f"{spec.num_kv_heads} key heads and {spec.num_kv_heads} value heads of {spec.head_dim} "
            f"(values: {spec.value_dim}) need {width}; use attend() for heads that differ in size"
        )
    out = qkv.new_empty((qkv.shape[0], spec.num_heads, spec.value_dim))
    _attend_qkv_into(spec, qkv, rotary, positions, out, sinks)
    return out


@eager_break
def _attend_qkv_into(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    metadata.backend.forward_qkv(spec, qkv, rotary, positions, metadata, out, sinks)


@functools.cache
def _spec_of(*values: Any) -> AttentionSpec:
    return AttentionSpec(**dict(zip(_FIELDS, values, strict=True)))


def _attend_with_fields(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    *values: Any,
) -> None:
    _attend_into(_spec_of(*values), query, key, value, out, sinks)


# Attention as torch.compile sees it, and where a compiled model is split: an operator takes plain
# values, so a spec is passed field by field.
_FIELDS = tuple(field.name for field in fields(AttentionSpec))
_FIELDS_SCHEMA = ", ".join(f"{field.type} {field.name}" for field in fields(AttentionSpec))
_attend_operator = splitting_operator(
    f"""attend(
    Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor? sinks,
    {_FIELDS_SCHEMA.replace(" | None", "?")}
) -> ()""",
    _attend_with_fields,
)
