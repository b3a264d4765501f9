"""Latent attention (MLA) over the paged cache: ``attend_latent``.

A token's row in the cache, shared by all heads, is a latent vector, normed, and behind it a key
with RoPE. Queries come in the space of the latent vectors: a model absorbs the projection from
these to keys into its queries, and applies that to values to the result. So rows serve as keys of
one KV head, and their latent vectors as values.
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
    rope_query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Latent attention of one layer for the batch in the forward context -> [T, heads, rank].

    ``query`` [T, heads, rank] and ``rope_query`` [T, heads, rope_dim], before RoPE; ``compressed``
    [T, rank + rope_dim], before the norm and RoPE: the row to store. All may be strided.
    ``positions`` [T] int64: rows of the RoPE table. A graph breaks here as it does at ``attend``.
    Not for code under torch.compile.
    """
    widths = query.shape[2], rope_query.shape[2], compressed.shape[1]
    rank, row = spec.value_dim, spec.head_dim
    if widths != (rank, row - rank, row) or not spec.values_in_keys or spec.num_kv_heads != 1:
        raise ConfigError(
            f"attend_latent got queries of {widths[0]} and {widths[1]} columns and rows of "
            f"{widths[2]}; rows of {row} in the cache, {rank} of them values, need {rank}, "
            f"{row - rank} and {row}, one KV head and values_in_keys"
        )
    out = query.new_empty((query.shape[0], spec.num_heads, rank))
    _attend_latent_into(spec, query, rope_query, compressed, embedding, positions, out)
    return out


@eager_break
def _attend_latent_into(
    spec: AttentionSpec,
    query: torch.Tensor,
    rope_query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    metadata.backend.forward_latent(
        spec, query, rope_query, compressed, embedding, positions, metadata, out
    )
