"""Latent attention (MLA) over the paged cache: ``attend_latent``.

A token's row in the cache, shared by all heads, is a latent vector, normed, and behind it a key
with RoPE. Keys and values of a head are projections of the latent vector, and there are two ways to
attend to them. *Absorbed*: queries are projected into the space of latent vectors, so that rows
serve as keys of one KV head and their latent vectors as values; what is mixed is projected to
values. *Expanded*: keys and values of every head are computed, and attended to as usual.
``latent_expansion`` says which pays off where; the result is the same.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break


def attend_latent(
    spec: AttentionSpec,
    query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Latent attention of one layer for the batch in the forward context -> [T, heads, v_head_dim].

    ``query`` [T, heads, nope_dim + rope_dim], before RoPE; ``compressed`` [T, rank + rope_dim],
    before the norm and RoPE: the row to store. Both may be strided. ``positions`` [T] int64: rows
    of the RoPE table. A graph breaks here as it does at ``attend``. Not for code under
    torch.compile.
    """
    num_heads, width, rank = embedding.up.shape
    rope = embedding.table.shape[1]
    value_dim = width + rope - query.shape[2]
    got = (rank, rank + rope, compressed.shape[1], num_heads, query.shape[1])
    wanted = (spec.value_dim, spec.head_dim, spec.head_dim, spec.num_heads, spec.num_heads)
    if got != wanted or value_dim < 1 or not spec.values_in_keys or spec.num_kv_heads != 1:
        raise ConfigError(
            f"attend_latent got {query.shape[1]} query heads of {query.shape[2]} columns, rows of "
            f"{compressed.shape[1]}, and projections of shape {tuple(embedding.up.shape)}, which "
            f"do not fit the layer: {spec.num_heads} heads over cache rows of {spec.head_dim}, "
            f"{spec.value_dim} of them values; it also needs one KV head and values_in_keys"
        )
    out = query.new_empty((query.shape[0], num_heads, value_dim))
    _attend_latent_into(spec, query, compressed, embedding, positions, out)
    return out


@eager_break
def _attend_latent_into(
    spec: AttentionSpec,
    query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    metadata.backend.forward_latent(spec, query, compressed, embedding, positions, metadata, out)
