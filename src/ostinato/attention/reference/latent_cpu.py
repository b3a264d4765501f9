"""Latent attention on the CPU: long prompts over expanded keys, everything else absorbed.

The reference for the kernels that do the same on CUDA (``triton.latent_expand``). Like all
attention here, it goes request by request and reads the lengths when it runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.latent_expansion import least_queries
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.paged import PagedAttention, PagedBatch, batch_schema
from ostinato.attention.reference.paged_cpu import attend_requests, read_layout
from ostinato.ops.define import define_for_cpu


class LatentCpuAttention(PagedAttention):
    """A ``PagedAttention`` whose long prompts attend to expanded keys, on the CPU."""

    @torch.no_grad()
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
        if query.is_cuda:
            super().forward_latent(spec, query, compressed, embedding, positions, metadata, out)
            return
        rope, value_dim = embedding.table.shape[1], out.shape[2]
        least = least_queries(embedding.rank, query.shape[2], value_dim, rope)
        query, row = embedding.apply(query, compressed, positions)
        if metadata.uniform_decode or least is None or query.shape[0] < least:
            self.forward_absorbed(spec, query, row, embedding.up, metadata, out)
            return
        batch = PagedBatch.of(spec, metadata, out, None)
        capacity = batch.block_table.shape[1] * batch.key_cache.shape[1]
        query_lens = batch.query_start_loc.diff().minimum(batch.seq_lens.clamp(max=capacity))
        # Requests without keys get no result, and their new rows are stored all the same.
        rest = replace(metadata, seq_lens=batch.seq_lens.masked_fill(query_lens >= least, 0))
        self.forward_absorbed(spec, query, row, embedding.up, rest, out)
        _attend_expanded(query, embedding.up, least, *batch)


def attend_expanded(query: torch.Tensor, up: torch.Tensor, least: int, batch: PagedBatch) -> None:
    """Write the rows of requests with ``least`` queries or more; their keys are in the cache.

    ``query`` [T, heads, nope_dim + rope_dim], with RoPE.
    """
    rank, value_dim = up.shape[2], batch.out.shape[2]
    rows = batch.key_cache.flatten(0, 2)
    for queries in read_layout(batch).queries:
        if queries.query_len < least:
            continue
        its_rows = rows
        if queries.blocks is not None:
            its_rows = batch.key_cache.index_select(0, queries.blocks).flatten(0, 2)
        latent, key = its_rows[queries.origin :][: queries.seq_len].tensor_split((rank,), dim=1)
        heads = F.linear(latent, up.flatten(0, 1)).unflatten(1, (up.shape[0], -1))
        plain, values = heads.split((up.shape[1] - value_dim, value_dim), dim=2)
        keys = torch.cat((plain, key.unsqueeze(1).expand(-1, up.shape[0], -1)), dim=2)
        own = batch._replace(key_cache=keys.unsqueeze(0), value_cache=values.unsqueeze(0))
        attend_requests([queries._replace(origin=0, blocks=None)], query, own)


_attend_expanded = define_for_cpu(
    f"attend_expanded(Tensor query, Tensor up, int least, {batch_schema()}) -> ()",
    prepare=lambda query, up, least, *batch: (
        lambda: attend_expanded(query, up, least, PagedBatch(*batch))
    ),
)
