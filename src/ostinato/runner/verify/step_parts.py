"""The memory that a step of the runner writes: KV slots, states, tokens, counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ostinato.graphs.trust.shadow.memory_part import MemoryPart
from ostinato.models.base import CausalLM
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs
from ostinato.runner.step_memory import StepMemory


def forward_parts(
    memory: StepMemory,
    models: Sequence[CausalLM],
    req_indices: Sequence[int],
    query_lens: Sequence[int],
    padded: int,
) -> Iterator[MemoryPart]:
    """What the forward of these requests' next tokens writes, layer by layer, and its inputs."""
    state, cache = memory.state, memory.cache
    rows = torch.tensor(req_indices, device=memory.device)
    lens = torch.tensor(query_lens, device=memory.device)
    owners = torch.repeat_interleave(rows, lens)
    starts = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    offsets = torch.arange(len(owners), device=memory.device) - starts
    last = cache.max_model_len - 1
    positions = (state.num_computed[owners].long() + offsets).clamp_(max=last)
    blocks = state.block_table[owners, positions // cache.block_size].long()
    at = blocks, positions % cache.block_size
    for number, (keys, values) in enumerate(memory.kv_cache.layers):
        yield MemoryPart(name=f"the keys of layer {number}", tensor=keys, index=at)
        if values.data_ptr() != keys.data_ptr():
            yield MemoryPart(name=f"the values of layer {number}", tensor=values, index=at)
    for number, layer in enumerate(memory.states.layers if memory.states is not None else ()):
        for part, tensor in layer._asdict().items():
            if tensor is not None:
                name = f"the {part} of recurrent layer {number}"
                yield MemoryPart(name=name, tensor=tensor, index=(rows,))
    yield MemoryPart(
        name="the numbers of computed tokens", tensor=state.num_computed, index=(rows,)
    )
    for number, tensor in enumerate(memory.proposer.tensors() if memory.proposer else ()):
        yield MemoryPart(name=f"memory {number} of the drafts", tensor=tensor, compared=False)
    # Written by both runs, but with other padding.
    ids = memory.buffers.input_ids
    yield MemoryPart(name="the inputs", tensor=ids, index=(slice(padded),), compared=False)
    for model in models:
        for name, tensor in model.module.named_buffers():
            if not tensor.is_floating_point():
                yield MemoryPart(name=f"{name} of model {models.index(model)}", tensor=tensor)


def token_parts(
    memory: StepMemory, req_indices: Sequence[int], query_len: int, *, behind: int = 0
) -> Iterator[MemoryPart]:
    """What sampling one step of a decode batch writes.

    ``behind``: by how many tokens the requests may have advanced in this step already.
    """
    state, buffers = memory.state, memory.buffers
    rows = torch.tensor(req_indices, device=memory.device).unsqueeze(1)
    window = torch.arange(-behind, query_len + 2, device=memory.device)
    positions = state.num_computed[rows].long() + window
    positions = positions.clamp_(0, state.token_ids.shape[1] - 1)
    num_reqs = len(req_indices)
    if query_len > 1:
        accepted = (slice(num_reqs * (query_len + 1)),)
        yield MemoryPart(name="the accepted tokens", tensor=buffers.accepted, index=accepted)
    sampled = (slice(num_reqs * query_len),)
    yield MemoryPart(name="the sampled tokens", tensor=buffers.sampled, index=sampled)
    yield MemoryPart(name="the requests' tokens", tensor=state.token_ids, index=(rows, positions))


def sampler_parts(
    memory: StepMemory, samplers: SamplerGraphs, graph: SamplerGraph, req_indices: Sequence[int]
) -> Iterator[MemoryPart]:
    """What the full sampler of a decode batch writes."""
    query_len = graph.query_len
    yield from token_parts(memory, req_indices, query_len, behind=query_len + 1)
    rows = torch.tensor(req_indices, device=memory.device)
    computed = memory.state.num_computed
    yield MemoryPart(name="the numbers of computed tokens", tensor=computed, index=(rows,))
    if graph.kind.logprobs:
        tokens, values = samplers.logprobs(len(req_indices) * query_len)
        yield MemoryPart(name="the tokens with logprobs", tensor=tokens)
        yield MemoryPart(name="the logprobs", tensor=values)
