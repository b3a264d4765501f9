"""Start-up: from a configuration to a runner that is ready, graphs captured.

The order is given by what depends on what: the model says how much KV a token takes and how long
sequences may be; the memory that is left says how many blocks there are; the buffers follow from
those; and the graphs hold the addresses of all of them, so they come last.
"""

from __future__ import annotations

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.capture_inputs import prepare_capture_inputs
from ostinato.graphs.context import set_forward_context
from ostinato.graphs.descriptor import BatchDescriptor
from ostinato.graphs.modes import CUDAGraphMode, ResolvedMode, resolve_mode
from ostinato.graphs.plan import CapturePlan, PlanEntry
from ostinato.runtime.attention import create_attention
from ostinato.runtime.attention.base import AttentionBackend
from ostinato.runtime.config import CPU_KV_CACHE_BYTES, EngineConfig
from ostinato.runtime.input_buffers import InputBuffers
from ostinato.runtime.kv_cache import CacheSize, KVCache, bytes_per_block, size_cache
from ostinato.runtime.model_runner import ModelRunner
from ostinato.runtime.models.base import CausalLM
from ostinato.runtime.models.load import LoadedModel, load_model

# What a captured graph takes outside the pool, in the driver; measured on an H200 for a 1B model.
_BYTES_PER_GRAPH = 2**20


def load(config: EngineConfig) -> LoadedModel:
    """The model, on its device."""
    device = config.torch_device()
    return load_model(
        config.model,
        device=device,
        dtype=config.torch_dtype(device),
        random_weights=config.random_weights,
        seed=config.seed,
        max_position=config.max_model_len,
        show_progress=config.show_progress,
    )


def plan_graphs(
    config: EngineConfig, device: torch.device, backend: AttentionBackend
) -> tuple[CapturePlan, ResolvedMode]:
    """Which graphs there will be; needs no weights."""
    max_num_seqs, max_num_batched_tokens = config.batch_limits(device)
    requested = config.graphs.mode
    if requested is None:
        requested = CUDAGraphMode.FULL_AND_PIECEWISE
    assert isinstance(requested, CUDAGraphMode)
    # Every model calls attention through ``attend``, and its graphs can be broken there.
    resolved = resolve_mode(requested, backend.support, piecewise_available=True)
    sizes = () if resolved.mode is CUDAGraphMode.NONE else config.capture_sizes(device)
    plan = CapturePlan.build(
        resolved.mode,
        sizes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return plan, resolved


def build_runner(config: EngineConfig, model: CausalLM) -> tuple[ModelRunner, ResolvedMode]:
    """Size the KV cache, allocate everything, capture the graphs."""
    backend = create_attention(config.attention, model.device)
    plan, resolved = plan_graphs(config, model.device, backend)
    per_block = bytes_per_block(model.attention_specs, config.block_size, model.dtype)
    cache = size_cache(
        kv_cache_budget(config, model, plan, backend),
        bytes_per_block=per_block,
        block_size=config.block_size,
        model_limit=model.max_position,
        max_model_len=config.max_model_len,
        max_num_seqs=plan.max_num_seqs,
    )
    runner = ModelRunner(
        model,
        plan,
        graphs=config.graphs,
        cache=cache,
        backend=backend,
        show_progress=config.show_progress,
    )
    try:
        runner.compile_model()
        runner.capture_model()
    except BaseException:
        runner.close()
        raise
    return runner, resolved


def kv_cache_budget(
    config: EngineConfig, model: CausalLM, plan: CapturePlan, backend: AttentionBackend
) -> int:
    """Bytes for the KV cache: a setting, or on CUDA what weights, activations and graphs leave."""
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory)
    if model.device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    eager = activation_bytes(model, plan, plan.max_num_batched_tokens, config, backend)
    graphs = 0
    if plan.entries:
        largest = max(entry.descriptor.num_tokens for entry in plan.entries)
        graphs = activation_bytes(model, plan, largest, config, backend)
        graphs += len(plan.entries) * _BYTES_PER_GRAPH
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - eager - graphs
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: of {total:,} bytes, {total - free:,} are in use, "
            f"a step takes {eager:,} and the graphs {graphs:,}; lower max_num_batched_tokens or "
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
) -> int:
    """The peak of live memory that an eager step of ``num_tokens`` takes; logits included."""
    cache = CacheSize(
        num_blocks=1,
        block_size=config.block_size,
        max_model_len=config.max_model_len or model.max_position,
    )
    kv_cache = KVCache(
        model.attention_specs,
        num_blocks=1,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    buffers = InputBuffers(
        max_num_seqs=plan.max_num_seqs,
        max_num_tokens=plan.max_num_batched_tokens,
        cache=cache,
        device=model.device,
    )
    entry = PlanEntry(
        mode=CUDAGraphMode.FULL,
        descriptor=BatchDescriptor(num_tokens, num_reqs=min(num_tokens, plan.max_num_seqs)),
    )
    inputs = prepare_capture_inputs(entry, plan, buffers.tokens, max_model_len=cache.max_model_len)
    inputs.seq_lens.clamp_(max=cache.max_model_len)
    metadata = buffers.metadata(
        num_reqs=inputs.num_reqs,
        num_tokens=num_tokens,
        max_query_len=inputs.max_query_len,
        max_seq_len=cache.max_model_len,
        kv_cache=kv_cache,
        backend=backend,
    )
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    assert inputs.input_ids is not None
    with set_forward_context(attn_metadata=metadata):
        hidden = model.forward(inputs.input_ids, inputs.positions)
    model.compute_logits(hidden[: inputs.num_reqs])
    return torch.cuda.max_memory_allocated(model.device) - before
