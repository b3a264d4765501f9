"""Decode context parallelism with Triton kernels: for CUDA, in or out of graphs, for any batch.

The exchange is that of ``context_parallel``. A row of a rank's result has the log-sum-exp behind
its values, and heads come first, so that the result is sent as it is.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.paged import PagedBatch
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton_paged import store_heads, store_qkv, triton_part_attention
from ostinato.parallel.context.context_parallel import ContextParallelAttention

# Triton compiles a separate kernel for strides that 16 does not divide; those between heads follow
# from the number of tokens.
_ALIGNED = 16


class TritonContextParallelAttention(ContextParallelAttention):
    """``ContextParallelAttention`` in four kernels, two exchanges and the copies these need.

    Never relies on ``max_seq_len``. CPU tensors are for the tests, under Triton's interpreter.
    """

    name = "triton, context parallel"

    @torch.no_grad()
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
        if query.shape[0] == 0:
            return
        batch = PagedBatch.of(spec, metadata, out, sinks)
        store_heads(key, value, batch)
        self._attend(query, batch, metadata)

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
        if qkv.shape[0] == 0:
            return
        batch = PagedBatch.of(spec, metadata, out, sinks)
        self._attend(store_qkv(qkv, positions, rotary, batch), batch, metadata)

    def _attend(self, query: torch.Tensor, batch: PagedBatch, metadata: AttentionMetadata) -> None:
        """Attend over what is in the ranks' caches, and write all of ``batch.out``."""
        from ostinato.attention.triton.combine_ranks import combine_ranks

        comm, part = self._comm, self.part
        own_lens = metadata.dcp_local_seq_lens
        assert own_lens is not None, "the runner's buffers have it"
        everyones = comm.all_gather(query, dim=1)
        sinks = None if batch.sinks is None else comm.all_gather(batch.sinks)
        num_tokens, num_heads, _ = everyones.shape
        value_dim = batch.out.shape[2]
        width = value_dim // _ALIGNED * _ALIGNED + _ALIGNED
        shape = (num_heads, num_tokens, width)
        found = torch.empty(shape, device=query.device, dtype=torch.float32)
        rows = batch._replace(
            out=found.transpose(0, 1)[..., :value_dim],
            sinks=sinks if part.rank == 0 else None,  # once
        )
        triton_part_attention(everyones, rows, own_lens, part)
        parts = comm.all_to_all(found, split_dim=0, concat_dim=0).unflatten(0, (comm.size, -1))
        combine_ranks(parts, batch.query_start_loc, batch.out)
