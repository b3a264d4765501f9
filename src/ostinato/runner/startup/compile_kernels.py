"""Compiles the Triton kernels of a model side by side, before anything else runs it.

Without this, the first start on a machine compiles each kernel where it is first launched: in
measurements of a step's memory and in warm-ups. Later starts find the kernels in Triton's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING

import torch

from ostinato.attention.base import AttentionBackend
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.models.base import CausalLM
from ostinato.ops.triton.compile_ahead import can_compile_ahead, compiling_ahead
from ostinato.runner.decode_step import decode_step
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.model_graphs import kernels_of, prepare_batch
from ostinato.runner.sampling.draft_sampling import read_step
from ostinato.runner.step_memory import StepMemory

if TYPE_CHECKING:
    from ostinato.speculative.speculation import Speculation

logger = logging.getLogger(__name__)


def compile_kernels(
    model: CausalLM,
    plan: CapturePlan,
    backend: AttentionBackend,
    *,
    block_size: int,
    max_model_len: int | None,
    show_progress: bool,
    speculation: Speculation | None = None,
) -> None:
    """Compile the kernels of every graph of ``plan``, and of the largest step; CUDA only.

    If this fails, a warning says so, and kernels are compiled when they are launched.
    """
    if model.device.type != "cuda" or find_spec("triton") is None or not can_compile_ahead():
        return
    cache = CacheSize(
        num_blocks=1, block_size=block_size, max_model_len=max_model_len or model.max_position
    )
    try:
        with compiling_ahead(show_progress=show_progress):
            memory = StepMemory.allocate(model, plan, cache, backend, speculation)
            request_kernels(model, plan, memory)
    except Exception as error:
        logger.warning(
            "kernels are compiled one after another, because asking for them ahead failed (%s: %s)",
            type(error).__name__,
            error,
        )
    torch.cuda.empty_cache()


@torch.no_grad()
def request_kernels(model: CausalLM, plan: CapturePlan, memory: StepMemory) -> None:
    """Launch every kernel of the plan's graphs and of the largest step at least once.

    For ``compiling_ahead``, under which our kernels write nothing: ``memory`` must be new, so that
    indices in it are valid. Values are meaningless.
    """
    with model.few_layers():
        for entry in _entries(model, plan):
            batch = prepare_batch(entry, plan, memory)
            inputs = batch.inputs
            with set_forward_context(
                CUDAGraphMode.NONE,
                entry.descriptor,
                attn_metadata=batch.attn_metadata,
                slot_mapping=batch.slot_mapping,
            ):
                if inputs.uniform_decode:
                    query_len = plan.query_len_of(entry.descriptor)
                    decode_step(model, model.forward, memory, inputs.num_reqs, query_len)
                else:
                    assert inputs.input_ids is not None
                    hidden = model.forward(inputs.input_ids, inputs.positions)
                    model.compute_logits(hidden[: inputs.num_reqs])
                    read_step(memory, batch.attn_metadata)  # by a draft model


def _entries(model: CausalLM, plan: CapturePlan) -> Iterator[PlanEntry]:
    """One entry of each kernel class, and the steps whose memory start-up measures.

    Decode first: its attention takes the longest to compile.
    """
    classes: dict[Hashable, PlanEntry] = {}
    for entry in plan.entries:
        kernels = kernels_of(model.num_token_ranks, entry)
        classes.setdefault((entry.mode, entry.descriptor.uniform, kernels), entry)
    yield from sorted(classes.values(), key=lambda entry: not entry.descriptor.uniform)
    largest = max((entry.descriptor.num_tokens for entry in plan.entries), default=1)
    measured = {plan.padded_tokens(size) for size in (plan.max_num_batched_tokens, largest)}
    whole = {
        (entry.descriptor.num_tokens, entry.descriptor.has_lora)
        for entry in classes.values()
        if entry.mode is CUDAGraphMode.FULL and not entry.descriptor.uniform
    }
    for num_tokens, num_loras in product(sorted(measured), sorted({0, plan.max_loras})):
        if (num_tokens, num_loras > 0) in whole:
            continue
        descriptor = BatchDescriptor(
            num_tokens,
            num_reqs=min(num_tokens, plan.max_num_seqs),
            has_lora=num_loras > 0,
            num_active_loras=num_loras,
        )
        yield PlanEntry(mode=CUDAGraphMode.PIECEWISE, descriptor=descriptor)
