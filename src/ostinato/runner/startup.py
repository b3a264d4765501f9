"""Start-up: from a configuration to a runner with captured graphs.

The order follows the dependencies: the model determines the kernels, the KV bytes of a token and
the longest sequence; the free memory, once kernels have run, determines the number of blocks; the
buffers follow from both; and the graphs hold the addresses of all of them, so they come last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ostinato.attention import create_attention
from ostinato.attention.base import AttentionBackend
from ostinato.config import CPU_KV_CACHE_BYTES, EngineConfig
from ostinato.errors import CaptureError, CaptureOutOfMemoryError, ConfigError
from ostinato.graphs.capture.capture_inputs import prepare_inputs_to_capture
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import (
    AttentionCGSupport,
    CUDAGraphMode,
    ResolvedMode,
    resolve_mode,
)
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry, sequence_parallel_sizes, shift_sizes
from ostinato.loading.load import LoadedModel, load_model
from ostinato.lora.adapter_weights import AdapterWeights
from ostinato.models.base import CausalLM
from ostinato.models.native.decoder import Decoder
from ostinato.ops.triton.compile_ahead import triton_starting
from ostinato.parallel.context_parallel import ContextParallelAttention
from ostinato.parallel.context_part import ContextPart
from ostinato.recurrent.chunks import most_chunks
from ostinato.runner import recurrent_models
from ostinato.runner.compile_kernels import compile_kernels
from ostinato.runner.draft_sampling import read_step
from ostinato.runner.kv_cache import CacheSize, bytes_per_block, size_cache
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.small_batch_model import SmallBatchModel
from ostinato.runner.step_memory import StepMemory

if TYPE_CHECKING:
    from ostinato.parallel.rank_context import RankContext
    from ostinato.speculative.options import Speculation
    from ostinato.vision.image_inputs import ImageInputs

logger = logging.getLogger(__name__)

# Driver memory of a captured graph for each layer, outside the pool; measured on an H200.
_BYTES_PER_GRAPH_LAYER = 2**16


def load(
    config: EngineConfig, rank_context: RankContext | None = None, *, tokenizer: bool = True
) -> LoadedModel:
    """Load the model onto its device, or this rank's part of it with a ``rank_context``."""
    device = config.torch_device() if rank_context is None else rank_context.device
    with triton_starting(device):
        return load_model(
            None if config.model is None else str(config.model),
            device=device,
            dtype=config.torch_dtype(device),
            random_weights=config.random_weights,
            seed=config.seed,
            max_position=config.max_model_len,
            show_progress=config.show_progress,
            rank_context=None if rank_context is None or rank_context.is_whole else rank_context,
            tokenizer=tokenizer,
            swiftkv_layers=config.swiftkv_layers,
            offload=config.offload,
        )


@dataclass(frozen=True, kw_only=True)
class GraphPlans:
    """The plans of the model and, for batches up to a threshold, of its shift model."""

    model: CapturePlan
    shift: CapturePlan | None
    threshold: int
    resolved: ResolvedMode

    def for_batch(self, num_tokens: int) -> CapturePlan:
        """The plan for a batch of ``num_tokens`` before padding."""
        if self.shift is None or num_tokens > self.threshold:
            return self.model
        return self.shift


def _default_mode(
    config: EngineConfig,
    device: torch.device,
    backend: AttentionBackend,
    support: AttentionCGSupport,
) -> CUDAGraphMode:
    """Whole graphs for all batches where they save time, else pieces for mixed batches.

    On the CPU a mixed batch is compute-bound. A configured compiler splits the model at attention.
    """
    whole = (
        device.type == "cuda"
        and support is AttentionCGSupport.ALWAYS
        and not backend.pays_for_padding(device)
        and config.graphs.compiler is None
    )
    return CUDAGraphMode.FULL_AND_FULL if whole else CUDAGraphMode.FULL_AND_PIECEWISE


def plan_graphs(
    config: EngineConfig,
    device: torch.device,
    backend: AttentionBackend,
    *,
    selects_tokens: bool,
    recurrent_support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
) -> GraphPlans:
    """Plan the graphs; needs no weights.

    ``selects_tokens``: the model is a SwiftKV model, whose late layers are split over all ranks for
    batches of every size; the shift model then has graphs of all sizes. ``recurrent_support``:
    which batches its recurrent layers can be captured for.
    """
    max_num_seqs, max_num_batched_tokens = config.batch_limits(device)
    requested = config.graphs.mode
    support = AttentionCGSupport.weakest([backend.support, recurrent_support])
    if requested is None:
        requested = _default_mode(config, device, backend, support)
    assert isinstance(requested, CUDAGraphMode)
    # Every model calls ``attend`` and ``recur``, where its graphs can be split.
    query_lens = config.decode_query_lens(device)
    resolved = resolve_mode(
        requested,
        support,
        decode_query_len=max(query_lens),
        piecewise_available=True,
        part="attention" if support is backend.support else "a recurrent layer",
    )
    sizes = () if resolved.mode is CUDAGraphMode.NONE else config.capture_sizes(device)
    separate = resolved.mode is CUDAGraphMode.FULL_AND_FULL
    mixed_sizes = config.mixed_capture_sizes(device) if separate else None
    whole = CapturePlan.build(
        resolved.mode,
        sizes,
        mixed_sizes=mixed_sizes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decode_query_lens=query_lens,
        max_loras=config.num_lora_slots,
    )
    sp, threshold = config.ulysses_sequence_parallel_size, config.shift_parallel_threshold or 0
    if sp == 1:
        return GraphPlans(model=whole, shift=None, threshold=0, resolved=resolved)
    to_base = partial(
        sequence_parallel_sizes,
        sp=sp,
        threshold=threshold,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    shares = config.mixed_capture_sizes(device, sp) if separate else None
    small = whole.sizes if selects_tokens else shift_sizes(whole.sizes, threshold=threshold)
    base_mixed = small_mixed = None
    if shares is not None:
        base_mixed = to_base(shares)
        small_mixed = shift_sizes(whole.mixed_sizes, threshold=threshold)
    return GraphPlans(
        model=whole.with_sizes(to_base(whole.sizes), mixed_sizes=base_mixed, token_multiple=sp),
        shift=whole.with_sizes(small, mixed_sizes=small_mixed) if threshold else None,
        threshold=threshold,
        resolved=resolved,
    )


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    rank_context: RankContext | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> tuple[ModelRunner, ResolvedMode]:
    """Compile kernels, size the KV cache, allocate everything, capture the graphs."""
    model = loaded.model
    recurrent_models.check_options(config, model)
    speculation = _load_speculation(config, model)
    backend = _attention(config, model, rank_context)
    plans = plan_graphs(
        config,
        model.device,
        backend,
        selects_tokens=model.selects_tokens,
        recurrent_support=AttentionCGSupport.weakest(
            spec.support for spec in model.recurrent_specs
        ),
    )
    plan = plans.model
    adapters = _adapters(config, loaded, plan)  # before memory is measured
    images = _images(config, model, plans)
    if rank_context is not None:
        rank_context.check_same("the plan of the graphs", _digest(plans))
    if rank_context is None or rank_context.is_whole:
        compile_kernels(
            model,
            plan,
            backend,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            show_progress=config.show_progress,
            speculation=speculation,
        )
    specs = [*model.attention_specs, *(speculation.attention_specs if speculation else ())]
    per_block = bytes_per_block(specs, config.block_size, model.dtype)
    reserved = 0 if images is None else images.reserved_bytes
    budget = kv_cache_budget(
        config, model, plans, backend, reserved=reserved, speculation=speculation
    )
    budget = recurrent_models.without_states(budget, model, plan.max_num_seqs)
    cache = size_cache(
        budget if rank_context is None else rank_context.least(budget),
        bytes_per_block=per_block,
        block_size=config.block_size,
        model_limit=model.max_position,
        max_model_len=config.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        part=_part_of(backend),
    )
    runner = make(
        model,
        plan,
        graphs=config.graphs,
        cache=cache,
        backend=backend,
        show_progress=config.show_progress,
        **({} if adapters is None else {"adapters": adapters}),
        **({} if images is None else {"images": images}),
        **_shifting(loaded, plans),
        **({} if speculation is None else {"speculation": speculation}),
    )
    try:
        runner.compile_model()
        runner.capture_model()
    except BaseException as error:
        runner.close()
        name_the_remedy(error)
        raise
    return runner, plans.resolved


def _attention(
    config: EngineConfig, model: CausalLM, rank_context: RankContext | None
) -> AttentionBackend:
    """The attention backend, connected to the ranks that share out the KV cache, if any do."""
    if rank_context is None or rank_context.layout.dcp == 1:
        return create_attention(config.attention, model.device)
    if model.selects_tokens:
        raise ConfigError(
            "decode_context_parallel_size does not support SwiftKV models; leave it out"
        )
    group = rank_context.layout.context_group(rank_context.rank)
    comm = rank_context.comm_of(group)
    attention: type[ContextParallelAttention] = ContextParallelAttention
    if create_attention(config.attention, model.device).name == "triton":
        from ostinato.parallel.triton_context_parallel import TritonContextParallelAttention

        attention = TritonContextParallelAttention
    return attention(comm, config.dcp_kv_cache_interleave_size)


def _part_of(backend: AttentionBackend) -> ContextPart | None:
    return backend.part if isinstance(backend, ContextParallelAttention) else None


def _adapters(
    config: EngineConfig, loaded: LoadedModel, plan: CapturePlan
) -> AdapterWeights | None:
    """Room for the adapters of ``loaded``'s model, if they are enabled."""
    if not config.enable_lora:
        return None
    model = loaded.model
    if not isinstance(model, Decoder) or model.selects_tokens:
        reason = loaded.generic_reason or "it is a SwiftKV model"
        raise ConfigError(
            f"enable_lora needs a dense model of the native decoder; this one is not: {reason}. "
            "Merge the adapter into the checkpoint with PEFT (merge_and_unload)"
        )
    adapters = model.adapters = AdapterWeights(
        model,
        max_loras=config.max_loras,
        max_rank=config.max_lora_rank,
        max_num_tokens=plan.padded_tokens(plan.max_num_batched_tokens),
    )
    logger.info(
        "room for %d adapters of rank %d takes %.3f GiB",
        config.max_loras,
        config.max_lora_rank,
        adapters.num_bytes / 2**30,
    )
    return adapters


def _load_speculation(config: EngineConfig, model: CausalLM) -> Speculation | None:
    """The source of drafts, with its weights if it has any."""
    speculation = config.speculative
    if speculation is None:
        return None
    assert not isinstance(speculation, str), "parsed on construction"
    if model.selects_tokens:
        raise ConfigError(
            "speculative does not work with SwiftKV models, which compute one token per request "
            "in their late layers; omit it"
        )
    load = partial(
        load_model,
        device=model.device,
        dtype=model.dtype,
        max_position=config.max_model_len,
        show_progress=config.show_progress,
        tokenizer=False,
    )
    with triton_starting(model.device):
        speculation = speculation.load(model, load)
    if speculation.aux_hidden_state_layers and config.graphs.compile:
        raise ConfigError(
            f"{type(config.speculative).__name__} reads hidden states inside the model, which a "
            f"compiled model does not give out; omit compile={config.graphs.compile!r}"
        )
    return speculation


def _images(config: EngineConfig, model: CausalLM, plans: GraphPlans) -> ImageInputs | None:
    """What a model that takes images needs beside its runner, with the encoder's graphs."""
    if not model.uses_mrope:
        return None
    if config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} does not support models that take images; leave it "
            "out"
        )
    if config.world_size > 1:
        raise ConfigError(
            f"models that take images run on one device, not on {config.world_size} ranks; leave "
            "out data_parallel_size"
        )
    from ostinato.vision.startup import build_image_inputs

    try:
        return build_image_inputs(config, model, plans.model)
    except BaseException as error:
        name_the_remedy(error)
        raise


def name_the_remedy(error: BaseException) -> None:
    """Add a remedy to the error of a capture that failed in the model's code."""
    if not (isinstance(error, CaptureError) and isinstance(error.__cause__, CaptureError)):
        return
    if not isinstance(error, CaptureOutOfMemoryError):
        error.args = (
            f"{error}. If that is the model's code, run it without graphs: "
            'graphs=GraphConfig(mode="NONE"), or --mode NONE on the command line',
        )


def _digest(plans: GraphPlans) -> str:
    return " ".join(plan.digest for plan in (plans.model, plans.shift) if plan is not None)


def _shifting(loaded: LoadedModel, plans: GraphPlans) -> dict[str, Any]:
    """The runner's arguments for the second model, if there is one."""
    if loaded.shift is None:
        return {}
    assert plans.shift is not None, "both follow from the threshold"
    shift = SmallBatchModel(
        model=loaded.shift, plan=plans.shift, threshold=plans.threshold, name="shift model"
    )
    return {"name": "base model", "small": shift}


def kv_cache_budget(
    config: EngineConfig,
    model: CausalLM,
    plans: GraphPlans,
    backend: AttentionBackend,
    *,
    reserved: int = 0,
    speculation: Speculation | None = None,
) -> int:
    """Bytes for the KV cache: as configured, or the CUDA memory left by weights, steps, graphs.

    ``reserved``: bytes that something else will allocate.
    """
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes)
    if model.device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    plan = plans.model
    most = plan.padded_tokens(plan.max_num_batched_tokens)
    # Also where every batch has a graph: the largest one is warmed up before its capture allocates.
    eager = activation_bytes(model, plan, most, config, backend, speculation) + reserved
    graphs = 0
    # A second model captures into the same pool, and its activations are no larger.
    entries = [*plan.entries, *(plans.shift.entries if plans.shift is not None else ())]
    if entries:
        largest = max(entry.descriptor.num_tokens for entry in entries)
        graphs = activation_bytes(model, plan, plan.padded_tokens(largest), config, backend)
        num_layers = len(model.attention_specs) + len(model.recurrent_specs)
        graphs += len(entries) * num_layers * _BYTES_PER_GRAPH_LAYER
        if plan.mode.mixed_mode() is CUDAGraphMode.FULL:  # their outputs are copied to a buffer
            graphs += largest * model.hidden_size * model.dtype.itemsize
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
) -> int:
    """The peak memory of an eager step of ``num_tokens``, including logits.

    With ``speculation``, a draft model reads the step's tokens too.
    """
    part = _part_of(backend)
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
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    assert inputs.input_ids is not None
    context = set_forward_context(batch_descriptor=entry.descriptor, attn_metadata=metadata)
    with context, model.few_layers():
        hidden = model.forward(inputs.input_ids, inputs.positions)
    num_sampled = inputs.num_reqs * plan.decode_query_lens[-1]
    _logits = model.compute_logits(hidden[:num_sampled])  # kept, as in a step
    read_step(memory, metadata)
    return torch.cuda.max_memory_allocated(model.device) - before
