"""Keys and values into the paged cache, and no attention: for layers whose queries come later.

To torch, and so to a graph, it is one operator, ``ostinato::store_kv``, which looks at the slots
when it runs. All backends share one layout of the cache, so it belongs to none of them.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.paged_cuda import store_rows
from ostinato.graphs.capture.context import get_forward_context
from ostinato.ops.define import define

_SCHEMA = """store_kv(
    Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping
) -> ()"""


def store_kv(spec: AttentionSpec, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write one layer's keys and values of all tokens of the batch in the forward context.

    ``key`` [T, num_kv_heads, head_dim], ``value`` [T, num_kv_heads, value_dim]; both may be
    strided. Padding tokens are not written. A graph holds it; it does not break there.
    """
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    key_cache, value_cache = metadata.kv_caches[spec.layer]
    _store_kv(key, value, key_cache, value_cache, metadata.slot_mapping)


def store_kv_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Only rows that have a slot are touched."""
    has_slot = slot_mapping >= 0
    if not has_slot.all():
        key, value, slot_mapping = key[has_slot], value[has_slot], slot_mapping[has_slot]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def store_kv_cuda(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The same in fixed shapes: padding writes to slot 0, which is nobody's, what is there."""
    store_rows(key, key_cache, slot_mapping)
    store_rows(value, value_cache, slot_mapping)


_store_kv = define(_SCHEMA, cpu=store_kv_cpu, cuda=store_kv_cuda)
