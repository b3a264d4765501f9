"""Attention over the paged cache with torch operators alone: runs anywhere, for any batch.

To torch, and so to a graph, it is one operator, ``ostinato::paged_attention``, which takes the
lengths as tensors and looks at them when it runs: on the CPU in ``paged_cpu``, on CUDA in
``paged_cuda``. It is the yardstick for faster kernels, not one of them.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.attention.paged_cpu import paged_attention_cpu
from ostinato.attention.paged_cuda import paged_attention_cuda
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define

_SCHEMA = """paged_attention(
    Tensor query, Tensor key, Tensor value,
    Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) out,
    Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor slot_mapping,
    Tensor? sinks, float scale, int? window, float? soft_cap, int max_seq_len
) -> ()"""


_paged_attention = define(_SCHEMA, cpu=paged_attention_cpu, cuda=paged_attention_cuda)


class TorchPagedAttention(AttentionBackend):
    """The ``AttentionBackend`` that needs nothing but torch.

    A token's result is that of its own request: other requests, padding and ``max_seq_len`` do not
    enter into it. On the CPU that holds to the bit; on CUDA to the bit for ``max_seq_len``, while
    a batch of another size may be rounded differently. ``max_query_len`` is not relied on.
    """

    name = "torch"
    support = AttentionCGSupport.ALWAYS

    @torch.no_grad()  # the cache would otherwise remember every step that wrote to it
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
        key_cache, value_cache = metadata.kv_caches[spec.layer]
        _paged_attention(
            query,
            key,
            value,
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
        )
