"""Decode context parallelism: the keys and values of a request are split over ranks by token.

Ranks of a tensor-parallel model that hold the same KV heads would all store the same keys. Here
each stores a part (``context_part.py``). A block of the cache has room for as many times more
tokens than each rank has slots in it as there are ranks, so requests are scheduled, and their block
tables written, as for one large cache. The inputs of a step have the slots of this rank alone.

To attend, the ranks exchange queries, each computes all heads of the group over its own keys, with
the log-sum-exp of the scores, and the results are combined by that. A query sees the keys up to its
own position, whichever rank has them, so batches with prompts work like decode batches.

This is the reference, with torch operators alone; ``triton_context_parallel`` has the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.attention.store import store_in_slots
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define
from ostinato.parallel.comm import Comm
from ostinato.parallel.context.context_part import ContextPart

_STEP_BYTES = 64 << 20  # of gathered keys and values


class PartBatch(NamedTuple):
    """One batch for one layer; the result is ``out`` [T, heads, value_dim] with ``lse`` [T, heads].

    ``AttentionSpec``, ``AttentionMetadata`` and ``AttentionBackend.forward`` describe the others.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    local_seq_lens: torch.Tensor
    block_table: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None
    max_local_len: int


class ContextParallelAttention(AttentionBackend):
    """The ``AttentionBackend`` of ranks that share keys; the members of ``comm`` call it together.

    The order of ``comm`` is that of the ranks' query heads. The batch's ``slot_mapping`` and
    ``dcp_local_seq_lens`` are of this rank's ``part``, all else of the whole.
    """

    name = "torch, context parallel"
    support = AttentionCGSupport.ALWAYS

    def __init__(self, comm: Comm, interleave: int = 1) -> None:
        self._comm = comm
        self.part = ContextPart(comm.size, comm.index, interleave)

    def pays_for_padding(self, device: torch.device) -> bool:
        return device.type != "cpu"

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
        comm, part = self._comm, self.part
        key_cache, value_cache = metadata.kv_caches[spec.layer]
        assert metadata.dcp_local_seq_lens is not None, "the runner's buffers have it"
        store_in_slots(key, value, key_cache, value_cache, metadata.slot_mapping)
        everyones = comm.all_gather(query, dim=1)
        if sinks is not None:
            sinks = comm.all_gather(sinks)
        num_tokens, num_heads, _ = everyones.shape
        found = query.new_empty((num_tokens, num_heads, spec.value_dim + 1), dtype=torch.float32)
        batch = PartBatch(
            key_cache,
            value_cache,
            found[..., :-1],
            found[..., -1],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.dcp_local_seq_lens,
            metadata.block_table,
            sinks if part.rank == 0 else None,  # once
            spec.scale,
            spec.window,
            spec.soft_cap,
            part.max_local_len(metadata.max_seq_len),
        )
        _attend_part(everyones, *batch, *part)
        parts = comm.all_to_all(found, split_dim=1, concat_dim=0).unflatten(0, (comm.size, -1))
        out.copy_(combine(parts[..., :-1], parts[..., -1]))


def part_of(backend: AttentionBackend) -> ContextPart | None:
    """This rank's part of the KV cache, if ranks share it out."""
    return backend.part if isinstance(backend, ContextParallelAttention) else None


def combine(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Attention over all keys, from that over parts of them.

    ``outs`` [parts, ..., value_dim], ``lses`` [parts, ...]: -inf where a part has no visible key.
    Rows without any become zero.
    """
    highest = lses.amax(0)
    weights = torch.exp(lses - torch.where(highest == -torch.inf, 0.0, highest))
    total = weights.sum(0).clamp(min=torch.finfo(weights.dtype).tiny)
    return (outs * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)


def _attend_part_cpu(query: torch.Tensor, batch: PartBatch, part: ContextPart) -> None:
    lengths = batch.local_seq_lens
    longest = int(lengths.max()) if lengths.numel() else 0
    attend_part(query, batch._replace(max_local_len=longest), part)


def attend_part(query: torch.Tensor, batch: PartBatch, part: ContextPart) -> None:
    """Attend over this part's keys, and write ``out`` and ``lse``.

    Shapes follow from those of the arguments and from ``max_local_len``; nothing is read back.
    """
    block_slots, num_kv_heads = batch.key_cache.shape[1:3]
    num_tokens, num_reqs = query.shape[0], batch.seq_lens.shape[0]
    starts = batch.query_start_loc
    index = torch.arange(num_tokens, device=query.device, dtype=starts.dtype)
    owner = torch.searchsorted(starts[1:], index, right=True)
    is_padding = owner == num_reqs
    owner = owner.clamp_(max=num_reqs - 1)
    position = batch.seq_lens[owner] - (starts[owner + 1] - index)
    position = position.masked_fill_(is_padding, -1)[:, None]
    q = query.float().unflatten(1, (num_kv_heads, -1)) * batch.scale  # [T, kv heads, group, dim]
    values = q.new_zeros((*q.shape[:3], batch.value_cache.shape[3]))
    if batch.sinks is None:
        highest = q.new_full((*q.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(highest)
    else:
        sinks = batch.sinks.float().view(1, num_kv_heads, -1, 1)
        highest = torch.where(is_padding[:, None, None, None], -torch.inf, sinks).expand(
            *q.shape[:3], 1
        )
        total = (highest > -torch.inf).float()
    num_blocks = min(-(-batch.max_local_len // block_slots), batch.block_table.shape[1])
    per_block = num_tokens * 4 * (batch.key_cache[0].numel() + batch.value_cache[0].numel())
    step = max(1, _STEP_BYTES // max(per_block, 1))
    for first in range(0, num_blocks, step):
        blocks = batch.block_table[:, first : min(first + step, num_blocks)][owner]
        slots = torch.arange(blocks.shape[1] * block_slots, device=query.device)
        keys = part.positions(first * block_slots + slots)[None]
        is_seen = keys <= position
        if batch.window is not None:
            is_seen &= keys > position - batch.window
        scores = torch.einsum("tkgd,tckd->tkgc", q, batch.key_cache[blocks].flatten(1, 2).float())
        if batch.soft_cap is not None:
            scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
        scores = scores.masked_fill(~is_seen[:, None, None], -torch.inf)
        seen = batch.value_cache[blocks].flatten(1, 2).float()
        seen = seen.masked_fill(~is_seen[:, :, None, None], 0.0)  # the others may hold anything
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        reference = torch.where(new_highest == -torch.inf, 0.0, new_highest)
        weights, fade = torch.exp(scores - reference), torch.exp(highest - reference)
        total = total * fade + weights.sum(-1, keepdim=True)
        values = values * fade + torch.einsum("tkgc,tckd->tkgd", weights, seen)
        highest = new_highest
    least = torch.finfo(total.dtype).tiny
    batch.out.copy_((values / total.clamp(min=least)).flatten(1, 2))
    batch.lse.copy_((highest + torch.log(total.clamp(min=least))).flatten(1, 3))


_BATCH = """Tensor key_cache, Tensor value_cache, Tensor(a!) out, Tensor(b!) lse,
    Tensor query_start_loc, Tensor seq_lens, Tensor local_seq_lens, Tensor block_table,
    Tensor? sinks, float scale, int? window, float? soft_cap, int max_local_len"""
_attend_part = define(
    f"attend_part(Tensor query, {_BATCH}, int size, int rank, int interleave) -> ()",
    cpu=_attend_part_cpu,
    cuda=attend_part,
    pack=lambda query, *args: (query, PartBatch(*args[:-3]), ContextPart(*args[-3:])),
)
