"""Attention over the paged cache with torch operators alone: runs anywhere, for any batch.

To torch, and so to a graph, it is one operator, ``ostinato::paged_attention``, which takes the
lengths as tensors and looks at them when it runs: on the CPU in ``paged_cpu``, on CUDA in
``paged_cuda``. It is the reference for faster kernels, not one of them.
"""

from __future__ import annotations

import torch

from ostinato.attention.paged import PagedBatch, heads_schema, over_heads
from ostinato.attention.reference.latent_cpu import LatentCpuAttention
from ostinato.attention.reference.paged_cpu import paged_attention_cpu
from ostinato.attention.reference.paged_cuda import paged_attention_cuda
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define

_paged_attention = define(
    heads_schema("paged_attention"),
    cpu=over_heads(paged_attention_cpu),
    cuda=over_heads(paged_attention_cuda),
)


class TorchPagedAttention(LatentCpuAttention):
    """The ``AttentionBackend`` that needs nothing but torch.

    A token's result is that of its own request: other requests, padding and ``max_seq_len`` do not
    enter into it. On the CPU that holds to the bit; on CUDA to the bit for ``max_seq_len``, while
    a batch of another size may be rounded differently. ``max_query_len`` is not relied on.
    """

    name = "torch"
    support = AttentionCGSupport.ALWAYS

    def pays_for_padding(self, device: torch.device) -> bool:
        """Its shapes follow ``max_seq_len``, except on the CPU."""
        return device.type != "cpu"

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        _paged_attention(query, key, value, *batch)
