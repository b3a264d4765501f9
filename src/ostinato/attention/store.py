"""Stores keys and values in the paged cache without attention: for layers whose queries come later.

To torch, and so to a graph, it is one operator, ``ostinato::store_kv``, which looks at the slots
when it runs. All backends share one layout of the cache, so it belongs to none of them.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.reference.paged_cpu import store_kv_cpu
from ostinato.attention.reference.paged_cuda import store_kv_cuda
from ostinato.graphs.capture.context import get_forward_context
from ostinato.ops.define import define

_SCHEMA = """store_kv(
    Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping
) -> ()"""


def store_kv(spec: AttentionSpec, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write one layer's keys and values of all tokens of the batch in the forward context.

    ``key`` [T, num_kv_heads, head_dim], ``value`` [T, num_kv_heads, value_dim]; both may be
    strided. Padding tokens are not written. A graph contains it and does not break here.
    """
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    key_cache, value_cache = metadata.kv_caches[spec.layer]
    store_in_slots(key, value, key_cache, value_cache, metadata.slot_mapping)


store_in_slots = define(_SCHEMA, cpu=store_kv_cpu, cuda=store_kv_cuda)
