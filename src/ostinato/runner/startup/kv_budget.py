"""How much memory is left for the KV cache, once weights, steps and graphs have theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ostinato.attention.base import AttentionBackend
from ostinato.config import CPU_KV_CACHE_BYTES, EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.capture.capture_inputs import prepare_inputs_to_capture
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.models.base import CausalLM
from ostinato.parallel.context.context_parallel import part_of
from ostinato.recurrent.chunks import most_chunks
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.sampling.draft_sampling import read_step
from ostinato.runner.startup.peak_memory import peak_memory
from ostinato.runner.step_memory import StepMemory

if TYPE_CHECKING:
    from ostinato.speculative.speculation import Speculation


def kv_cache_budget(
    config: EngineConfig,
    model: CausalLM,
    plan: CapturePlan,
    backend: AttentionBackend,
    *,
    graphs: int = 0,
    reserved: int = 0,
    speculation: Speculation | None = None,
) -> int:
    """Bytes for the KV cache: as configured, or the CUDA memory left by weights, steps, graphs.

    ``graphs``: the estimated bytes of graphs. ``reserved``: bytes that something else will
    allocate.
    """
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes)
    if model.device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    most = plan.padded_tokens(plan.max_num_batched_tokens)
    # Also where every batch has a graph: the largest one is warmed up before its capture allocates.
    eager = activation_bytes(model, plan, most, config, backend, speculation) + reserved
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - eager - graphs
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: of {total:,} bytes, {total - free:,} are in use, "
            f"a step needs {eager:,} and the graphs {graphs:,}; lower max_num_batched_tokens or "
            "the capture sizes, or raise gpu_memory_utilization"
        )
    return budget


@torch.inference_mode()
def activation_bytes(
    model: CausalLM,
    plan: CapturePlan,
    num_tokens: int,
    config: EngineConfig,
    backend: AttentionBackend,
    speculation: Speculation | None = None,
    *,
    logits: bool = True,
) -> int:
    """The peak memory of an eager step of ``num_tokens``, including ``logits`` if they are set.

    With ``speculation``, a draft model reads the step's tokens too.
    """
    part = part_of(backend)
    cache = CacheSize(
        num_blocks=1,
        block_size=config.block_size if part is None else config.block_size * part.size,
        max_model_len=config.max_model_len or model.max_position,
        part=part,
    )
    memory = StepMemory.allocate(model, plan, cache, backend, speculation)
    buffers = memory.buffers
    entry = PlanEntry(
        mode=CUDAGraphMode.FULL,
        descriptor=BatchDescriptor(
            num_tokens,
            num_reqs=min(num_tokens, plan.max_num_seqs),
            has_lora=plan.max_loras > 0,
            num_active_loras=plan.max_loras,
        ),
    )
    inputs = prepare_inputs_to_capture(
        entry, plan, buffers.tokens, max_model_len=cache.max_model_len
    )
    inputs.seq_lens.clamp_(max=cache.max_model_len)
    metadata = memory.metadata(
        num_reqs=inputs.num_reqs,
        num_tokens=num_tokens,
        max_query_len=inputs.max_query_len,
        max_seq_len=cache.max_model_len,
        selected=True,
        uniform_decode=inputs.num_reqs == num_tokens,
        query_lens=most_chunks(num_tokens, inputs.num_reqs),
    )
    assert inputs.input_ids is not None
    context = set_forward_context(batch_descriptor=entry.descriptor, attn_metadata=metadata)
    with peak_memory(model.device) as peak:
        with context, model.few_layers():
            hidden = model.forward(inputs.input_ids, inputs.positions)
        if logits:
            num_sampled = inputs.num_reqs * plan.decode_query_lens[-1]
            _logits = model.compute_logits(hidden[:num_sampled])  # kept, as in a step
            read_step(memory, metadata)
    return peak.num_bytes
