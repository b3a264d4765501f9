"""Compares each captured graph with eager once: on made-up batches with poisoned padding.

The first batch is the smallest that runs through the graph, so that it has the most padding; the
second has none. Their requests have random tokens and random keys and values. Whatever belongs to
no request is NaN: the KV cache's padding block, the padding row of recurrent states. All of it is
put back afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.graphs.policy.descriptor import Choice
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.trust.shadow.memory_part import MemoryPart, read_parts, write_parts
from ostinato.graphs.trust.shadow.report import Mismatch
from ostinato.graphs.trust.shadow.shadow import ShadowedStep
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.steps.execution import SetBatch
from ostinato.runner.verify.step_shadow import StepShadow
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import NO_LORA, Request
from ostinato.scheduling.step_plan import ScheduledRequest, SchedulePlan

logger = logging.getLogger(__name__)

_SEED = 7
_FOUND = "at capture"


def try_graphs(
    graphs: ModelGraphs,
    entries: Sequence[PlanEntry],
    shadow: StepShadow,
    memory: StepMemory,
    set_batch: SetBatch,
) -> None:
    """Compare those of ``entries`` that were captured; quarantine graphs that differ."""
    for entry in entries:
        if entry not in graphs.manager.dispatcher.captured:
            continue  # it failed, and runs eagerly
        plans = [trial_plan(entry, graphs.plan, memory.cache, whole=each) for each in (False, True)]
        if plans[0] is None:
            logger.warning(
                "%s was not compared with eager: the KV cache has no room for its batches", entry
            )
        mismatch = None
        for plan in plans:
            choice = None if plan is None else graphs.dispatch(plan.shape)
            # A graph for more adapters than it has rows is never used.
            if plan is None or choice is None or not _is_of(entry, choice):
                continue
            with _requests_of(plan, memory, graphs.model.vocab_size):
                metadata = set_batch(plan, choice)
                mismatch = _try(plan, choice, metadata, shadow, memory)
            shadow.note(mismatch, choice)
            if mismatch is not None:
                break


def _is_of(entry: PlanEntry, choice: Choice) -> bool:
    return choice.descriptor == entry.descriptor and choice.mode is entry.mode


def _try(
    plan: SchedulePlan,
    choice: Choice,
    metadata: AttentionMetadata | None,
    shadow: StepShadow,
    memory: StepMemory,
) -> Mismatch | None:
    step, _ = (
        shadow.steps.decode_step(plan, choice, None)
        if choice.uniform_decode
        else shadow.steps.mixed_step(plan, choice, metadata, None)
    )
    before = read_parts(step.parts)
    mismatch = shadow.compare(step, _FOUND)
    write_parts(step.parts, before)
    others = len(plan.requests) > 1
    for kept in (0, len(plan.requests) - 1) if others else ():
        mismatch = mismatch or _try_row(plan, choice, step, kept, shadow, memory)
    return mismatch


def _try_row(
    plan: SchedulePlan,
    choice: Choice,
    step: ShadowedStep,
    kept: int,
    shadow: StepShadow,
    memory: StepMemory,
) -> Mismatch | None:
    """Change the tokens of all requests but one: its results must not change."""
    start = sum(item.num_tokens for item in plan.requests[:kept])
    rows = {choice.padded_num_tokens: slice(start, start + plan.requests[kept].num_tokens)}
    others = [item for index, item in enumerate(plan.requests) if index != kept]
    change = _other_tokens(others, plan, start, kept, memory)
    return shadow.check_row(step, change, rows, _FOUND)


@contextmanager
def _other_tokens(
    others: Sequence[ScheduledRequest],
    plan: SchedulePlan,
    start: int,
    kept: int,
    memory: StepMemory,
) -> Iterator[None]:
    """Inside, these requests compute other tokens: in the state, and in filled buffers."""
    ids, tokens = memory.buffers.input_ids, memory.state.token_ids
    stop = start + plan.requests[kept].num_tokens
    parts = [MemoryPart(name="ids", tensor=ids, index=(slice(plan.num_tokens),))]
    parts += [
        MemoryPart(
            name=str(item.req_index),
            tensor=tokens,
            index=(item.req_index, slice(item.start, item.start + item.num_tokens)),
        )
        for item in others
    ]
    before = read_parts(parts)
    for part in parts:
        part.write((before[part.name] - 1).abs())
    ids[start:stop] = before["ids"][start:stop]
    try:
        yield
    finally:
        write_parts(parts, before)


# --- the batch -----------------------------------------------------------------------------------


def trial_plan(
    entry: PlanEntry, plan: CapturePlan, cache: CacheSize, *, whole: bool
) -> SchedulePlan | None:
    """The smallest batch that runs through ``entry``, or one that needs no padding (``whole``).

    None if the KV cache has no room for it.
    """
    key = entry.descriptor
    query_len = plan.query_len_of(key) if key.uniform else 1
    sizes = plan.decode_sizes_for(query_len) if key.uniform else plan.mixed_sizes
    smaller = max((size for size in sizes if size < key.num_tokens), default=0)
    num_tokens = key.num_tokens if whole else smaller + 1
    if key.uniform:
        lengths = [query_len] * -(-num_tokens // query_len)
    else:
        lengths = _mixed_lengths(num_tokens, plan, cache)
    rows = _rows(lengths, key.num_active_loras, cache, decodes=key.uniform)
    if rows is None:
        return None
    if key.uniform and query_len > 1:
        return SchedulePlan.with_drafts(rows, query_len - 1)
    return SchedulePlan.of(rows, sum(lengths), [])


def _mixed_lengths(num_tokens: int, plan: CapturePlan, cache: CacheSize) -> list[int]:
    """A request with one token, then chunks of prompts."""
    longest = max(1, cache.max_model_len - 1)
    lengths, rest = [1], num_tokens - 1
    while rest and len(lengths) < plan.max_num_seqs:
        lengths.append(min(rest, longest))
        rest -= lengths[-1]
    lengths[0] += rest
    return lengths


def _rows(
    lengths: Sequence[int], num_loras: int, cache: CacheSize, *, decodes: bool
) -> list[ScheduledRequest] | None:
    """Requests that compute the given numbers of tokens, behind some that they have computed."""
    rows, block = [], 1  # block 0 is for padding
    room = cache.num_blocks - 1 - sum(-(-length // cache.block_size) for length in lengths)
    for index, length in enumerate(lengths):
        most = cache.max_model_len - length - 1
        # Contexts of different lengths, while there are blocks for them.
        start = max(0, min(1 + 5 * index % (2 * cache.block_size), most))
        needed = -(-(start + length + 1) // cache.block_size)
        spare = needed - -(-length // cache.block_size)
        if spare > room:
            start, spare = 0, 0
            needed = -(-length // cache.block_size)
        room -= spare
        if room < 0:
            return None
        # A mixed batch has a request that is still in its prompt.
        samples = decodes or index < len(lengths) - 1
        rows.append(_row(index, start, length, range(block, block + needed), samples, num_loras))
        block += needed
    return rows


def _row(
    index: int, start: int, length: int, blocks: range, samples: bool, num_loras: int
) -> ScheduledRequest:
    request = Request(
        request_id=f"trial {index}",
        prompt_token_ids=[],
        params=SamplingParams(),
        max_total_tokens=start + length + 1,
        lora_slot=index % num_loras if num_loras else NO_LORA,
        block_ids=list(blocks),
    )
    return ScheduledRequest(request, index, start, length, list(blocks), 0, True, samples, 0)


@contextmanager
def _requests_of(plan: SchedulePlan, memory: StepMemory, vocab_size: int) -> Iterator[None]:
    """Inside, the plan's requests are in the state and the cache, and padding is poisoned."""
    state = memory.state
    generator = torch.Generator(memory.device).manual_seed(_SEED)
    rows = slice(len(plan.requests))
    blocks = [block for item in plan.requests for block in item.request.block_ids]
    used = torch.tensor([0, *blocks], device=memory.device)
    floats = [
        MemoryPart(name=f"KV {number}", tensor=tensor, index=(used,))
        for number, tensor in enumerate(_caches(memory))
    ]
    recurrent = [] if memory.states is None else memory.states.layers
    states = [
        MemoryPart(name=f"state {number}", tensor=tensor)
        for number, tensor in enumerate(each for layer in recurrent for each in layer)
        if tensor is not None
    ]
    tensors = {
        "tokens": state.token_ids,
        "computed": state.num_computed,
        "blocks": state.block_table,
    }
    ints = [MemoryPart(name=name, tensor=tensor, index=(rows,)) for name, tensor in tensors.items()]
    parts = [*floats, *states, *ints]
    before = read_parts(parts)
    for part in (*floats, *states):
        noise = torch.empty_like(before[part.name]).normal_(generator=generator)
        noise[0 if part in floats else -1] = float("nan")
        part.write(noise)
    state.token_ids[rows].random_(0, vocab_size, generator=generator)
    for item in plan.requests:
        state.num_computed[item.req_index].fill_(item.start)
        blocks_of = torch.tensor(item.request.block_ids, dtype=torch.int32)
        state.block_table[item.req_index, : len(blocks_of)].copy_(blocks_of)
    try:
        yield
    finally:
        write_parts(parts, before)


def _caches(memory: StepMemory) -> Iterator[torch.Tensor]:
    for keys, values in memory.kv_cache.layers:
        yield keys
        if values.data_ptr() != keys.data_ptr():
            yield values
