"""Start-up: from a configuration to a runner with captured graphs.

The order follows the dependencies: the model determines the kernels, the KV bytes of a token and
the longest sequence; the free memory, once kernels have run, determines the number of blocks; the
buffers follow from both; and the graphs hold the addresses of all of them, so they come last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ostinato.attention import create_attention
from ostinato.attention.base import AttentionBackend
from ostinato.attention.invariant import InvariantAttention
from ostinato.config import EngineConfig
from ostinato.errors import CaptureError, CaptureOutOfMemoryError, ConfigError
from ostinato.graphs.policy.graph_memory import GraphMemoryReport
from ostinato.graphs.policy.modes import AttentionCGSupport, ResolvedMode
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.loading.load import LoadedModel, load_model
from ostinato.lora.adapter_weights import AdapterWeights
from ostinato.models.base import CausalLM
from ostinato.models.native.decoder import Decoder
from ostinato.ops.triton.compile_ahead import triton_starting
from ostinato.parallel.context.context_parallel import ContextParallelAttention, part_of
from ostinato.runner.capture.measured_capture import compare_with_estimate
from ostinato.runner.kv_cache import CacheSize, bytes_per_block, size_cache
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.sleep.sleep_memory import SleepMemory
from ostinato.runner.small_batch_model import SmallBatchModel
from ostinato.runner.startup import recurrent_models
from ostinato.runner.startup.batch_invariant import make_batch_invariant
from ostinato.runner.startup.compile_kernels import compile_kernels
from ostinato.runner.startup.graph_memory_estimate import GraphEstimate
from ostinato.runner.startup.graph_plans import GraphPlans, plan_graphs
from ostinato.runner.startup.kv_budget import kv_cache_budget
from ostinato.runner.verify.verified_execution import VerifiedExecution

if TYPE_CHECKING:
    from ostinato.parallel.rank_context import RankContext
    from ostinato.speculative.speculation import Speculation
    from ostinato.vision.image_inputs import ImageInputs

logger = logging.getLogger(__name__)


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


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    rank_context: RankContext | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> tuple[ModelRunner, ResolvedMode]:
    """Compile kernels, size the KV cache, allocate everything, capture the graphs."""
    model = loaded.model
    sleeping = _sleeping(config, loaded)  # before anything refers to where weights are
    recurrent_models.check_options(config, model)
    if config.batch_invariant:
        make_batch_invariant(loaded, is_split=config.tensor_parallel_size > 1)
    speculation = _load_speculation(config, model)
    if config.verify_policy:
        _check_can_verify(config, model, speculation)
    backend = attention_of(config, model, rank_context)
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
    plans, memory = _within_memory(config, model, plans, backend, rank_context)
    plan = plans.model
    cache = _cache_size(
        config,
        model,
        plan,
        backend,
        graphs=memory.estimated.total - memory.estimated.communicator,
        reserved=0 if images is None else images.reserved_bytes,
        speculation=speculation,
        rank_context=rank_context,
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
        **_verified(config, rank_context),
        **({} if sleeping is None else {"sleeping": sleeping}),
        graph_memory=memory,
    )
    try:
        runner.compile_model()
        if config.graphs.lazy_capture:
            runner.capture_image_encoder()
        else:
            runner.capture_model()
            if plan.entries:
                compare_with_estimate(runner.graph_memory)
    except BaseException as error:
        runner.close()
        name_the_remedy(error)
        raise
    return runner, plans.resolved


def _cache_size(
    config: EngineConfig,
    model: CausalLM,
    plan: CapturePlan,
    backend: AttentionBackend,
    *,
    graphs: int,
    reserved: int,
    speculation: Speculation | None,
    rank_context: RankContext | None,
) -> CacheSize:
    """The KV cache that fits beside ``graphs`` and ``reserved`` bytes, the same on all ranks."""
    specs = [*model.attention_specs, *(speculation.attention_specs if speculation else ())]
    budget = kv_cache_budget(
        config, model, plan, backend, graphs=graphs, reserved=reserved, speculation=speculation
    )
    budget = recurrent_models.without_states(budget, model, plan.max_num_seqs)
    return size_cache(
        budget if rank_context is None else rank_context.least(budget),
        bytes_per_block=bytes_per_block(specs, config.block_size, model.dtype),
        block_size=config.block_size,
        model_limit=model.max_position,
        max_model_len=config.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_tokens=config.kv_cache_tokens,
        part=part_of(backend),
    )


def _within_memory(
    config: EngineConfig,
    model: CausalLM,
    plans: GraphPlans,
    backend: AttentionBackend,
    rank_context: RankContext | None,
) -> tuple[GraphPlans, GraphMemoryReport]:
    """The plans whose graphs are estimated to fit ``graph_memory``, and that estimate."""
    estimate, budget = GraphEstimate.measure(config, model, plans, backend), config.graph_memory
    within = plans
    if budget is not None:
        within = estimate.within(plans, int(budget))
        if rank_context is not None:
            rank_context.check_same("the graphs within graph_memory", _digest(within))
    before, after = plans.model, within.model
    memory = GraphMemoryReport(
        estimated=replace(
            estimate.of(within),
            communicator=0 if rank_context is None else rank_context.communicator_bytes,
        ),
        budget=None if budget is None else int(budget),
        dropped_decode=_dropped(before, after, uniform=True),
        dropped_mixed=_dropped(before, after, uniform=False),
    )
    return within, memory


def _dropped(before: CapturePlan, after: CapturePlan, *, uniform: bool) -> tuple[int, ...]:
    """Sizes that have graphs of a kind in the one plan, but not in the other."""
    sizes, kept = (
        {each.descriptor.num_tokens for each in plan.entries if each.descriptor.uniform is uniform}
        for plan in (before, after)
    )
    return tuple(sorted(sizes - kept))


def _sleeping(config: EngineConfig, loaded: LoadedModel) -> SleepMemory | None:
    """The memory that ``sleep`` may release, with the weights in it."""
    if not config.enable_sleep_mode:
        return None
    sleeping = SleepMemory(loaded.model.device)
    forms = (loaded.model, loaded.shift)
    sleeping.move_weights([form for form in forms if form is not None])
    return sleeping


def _verified(config: EngineConfig, rank_context: RankContext | None) -> dict[str, Any]:
    """The runner's option for ``verify``, if that is on."""
    policy = config.verify_policy
    if not policy:
        return {}
    agree = None if rank_context is None else rank_context.any
    return {"execution": partial(VerifiedExecution, policy=policy, agree=agree)}


def _check_can_verify(
    config: EngineConfig, model: CausalLM, speculation: Speculation | None
) -> None:
    """Refuse to compare steps that write memory which cannot be put back."""
    given = f"verify={config.verify!r}"
    if model.uses_mrope:
        raise ConfigError(f"{given} does not support models that take images; leave it out")
    if speculation is not None and speculation.attention_specs:
        raise ConfigError(
            f"{given} does not support {type(config.speculative).__name__}, which has a KV cache "
            "of its own; leave one of them out, or draft by 'ngram' or 'suffix'"
        )


def attention_of(
    config: EngineConfig, model: CausalLM, rank_context: RankContext | None
) -> AttentionBackend:
    """The attention backend, connected to the ranks that share out the KV cache, if any do."""
    if config.batch_invariant:
        return InvariantAttention()
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
        from ostinato.parallel.context.triton_context_parallel import TritonContextParallelAttention

        attention = TritonContextParallelAttention
    return attention(comm, config.dcp_kv_cache_interleave_size)


def _adapters(
    config: EngineConfig, loaded: LoadedModel, plan: CapturePlan
) -> AdapterWeights | None:
    """Room for the adapters of ``loaded``'s model, if they are enabled."""
    if not config.enable_lora:
        return None
    model = loaded.model
    reason = _no_adapters_reason(loaded)
    if not isinstance(model, Decoder) or reason is not None:
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


def _no_adapters_reason(loaded: LoadedModel) -> str | None:
    """Why the model cannot have adapters; None if it can."""
    model = loaded.model
    if not isinstance(model, Decoder):
        return loaded.generic_reason
    if model.config.experts is not None:
        return "it has a mixture of experts"
    if model.config.latent is not None:
        return "it has latent attention"
    return "it is a SwiftKV model" if model.selects_tokens else None


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
