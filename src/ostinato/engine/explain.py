"""How a batch would run, and why, without loading a model; a local model's config is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.attention import create_attention
from ostinato.attention.base import AttentionBackend
from ostinato.config import EngineConfig
from ostinato.errors import BatchError
from ostinato.graphs.policy.descriptor import BatchShape, Choice
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import AttentionCGSupport, CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.loading.description import describe
from ostinato.loading.load import as_hf
from ostinato.runner.sampling.sampler_graphs import SamplerLaunch
from ostinato.runner.startup.graph_plans import GraphPlans, plan_graphs
from ostinato.runner.startup.recurrent_models import NO_PREFIX_CACHING
from ostinato.vision.vision_plan import images_shape, plan_vision

_PATCHES_PER_TOKEN = 4  # in all families so far


def explain_batch(
    config: EngineConfig,
    *,
    num_tokens: int,
    num_reqs: int,
    max_query_len: int | None = None,
    num_active_loras: int = 0,
    num_patches: int = 0,
) -> dict[str, Any]:
    """What dispatch chooses for one batch once the whole plan is captured.

    ``num_patches``: of the batch's images that are not encoded yet; they are encoded first.
    """
    if num_tokens < 1 or not 1 <= num_reqs <= num_tokens:
        raise BatchError(
            f"num_tokens is {num_tokens} and num_reqs is {num_reqs}, but every request has at "
            "least one token; use 1 <= num_reqs <= num_tokens"
        )
    least = -(-num_tokens // num_reqs)
    longest = least if max_query_len is None else max_query_len
    if not least <= longest <= num_tokens - num_reqs + 1:
        raise BatchError(
            f"max_query_len is {longest}, but the longest query of {num_reqs} requests with "
            f"{num_tokens} tokens has {least} to {num_tokens - num_reqs + 1}"
        )
    if not 0 <= num_active_loras <= config.num_lora_slots:
        raise BatchError(
            f"the batch has {num_active_loras} adapters, but at most {config.num_lora_slots} are "
            "loaded (enable_lora, max_loras)"
        )
    if num_patches < 0:
        raise BatchError(f"num_patches is {num_patches}; give 0 or more")
    backend, recurrent, plans = plan_for(config)
    plan, resolved = plans.for_batch(num_tokens), plans.resolved
    choice = _choice(plan, BatchShape(num_tokens, num_reqs, longest, num_active_loras))
    fits = num_tokens <= plan.max_num_batched_tokens and num_reqs <= plan.max_num_seqs
    limits = (
        f"a step takes at most {plan.max_num_batched_tokens} tokens (max_num_batched_tokens) and "
        f"{plan.max_num_seqs} requests (max_num_seqs)"
    )
    eager = choice.mode is CUDAGraphMode.NONE
    answer = {
        "batch": f"{num_tokens} tokens, {num_reqs} requests, longest query {longest}",
        "fits_one_step": "yes" if fits else f"no: {limits}",
        "requested_mode": resolved.requested.name,
        "mode_in_force": resolved.mode.name,
        "mode_changed_because": resolved.reason or "-",
        "attention": f"{backend.name}, capturable: {backend.support.name}",
        "prefix_caching": _how_it_caches(config, recurrent),
        "runs": "eagerly" if eager else f"{choice.mode.name} graph",
        "padded_to": choice.padded_num_tokens,
        "padding": choice.padded_num_tokens - num_tokens,
        "key": "-" if eager else str(choice.descriptor),
        "reason": choice.reason.value,
        "full_sampler": _how_it_samples(choice),
        "captured_sizes": list(plan.sizes),
        "sizes_without_decode_graph": list(plan.sizes_without_decode),
    }
    if recurrent is not None:
        answer["recurrent_layers"] = f"capturable: {recurrent.name}"
    if plan.mixed_sizes != plan.sizes:
        answer["mixed_sizes"] = list(plan.mixed_sizes)
    if plans.shift:
        answer["model"] = "shift" if plan is plans.shift else "base"
    if num_patches:
        sizes = config.vision_capture_sizes(config.torch_device())
        answer |= _how_images_run(sizes, num_patches)
    return answer


def plan_for(
    config: EngineConfig,
) -> tuple[AttentionBackend, AttentionCGSupport | None, GraphPlans]:
    """The attention, the support of recurrent layers (None: there are none), and the plans."""
    device = config.torch_device()
    backend = create_attention(config.attention, device)
    recurrent = _recurrent_support(config)
    plans = plan_graphs(
        config,
        device,
        backend,
        selects_tokens=config.swiftkv_layers is not None,
        recurrent_support=AttentionCGSupport.ALWAYS if recurrent is None else recurrent,
    )
    return backend, recurrent, plans


def all_captured(plan: CapturePlan) -> Dispatcher:
    """Dispatch by ``plan`` as it is once all of it is captured."""
    dispatcher = Dispatcher(plan)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    return dispatcher


def _choice(plan: CapturePlan, shape: BatchShape) -> Choice:
    return all_captured(plan).dispatch(shape)


def _how_images_run(sizes: Sequence[int], num_patches: int) -> dict[str, Any]:
    """How the vision encoder runs images of ``num_patches`` in one batch."""
    plan = plan_vision(sizes, merge=_PATCHES_PER_TOKEN)
    choice = _choice(plan, images_shape(num_patches, 1))
    how = f"eagerly: {choice.reason.value}"
    if choice.mode is not CUDAGraphMode.NONE:
        how = f"{choice.mode.name} graph of {choice.padded_num_tokens} patches"
    return {"images": f"{num_patches} patches, {how}", "vision_sizes": list(plan.sizes)}


def _recurrent_support(config: EngineConfig) -> AttentionCGSupport | None:
    """Of a model in a local directory; None if it has no recurrent layers, or is elsewhere."""
    if config.model is None or not (Path(config.model).expanduser() / "config.json").is_file():
        return None
    described = describe(Path(config.model).expanduser())
    if described.generic_reason is None:
        return None
    from ostinato.models.hf.support import recurrent_support

    return recurrent_support(as_hf(described.config))


def _how_it_caches(config: EngineConfig, recurrent: AttentionCGSupport | None) -> str:
    if config.enable_prefix_caching is False:
        return "off: enable_prefix_caching is False"
    return "on" if recurrent is None else f"off: {NO_PREFIX_CACHING}"


def _how_it_samples(choice: Choice) -> str:
    """How requests that want more than a temperature are sampled."""
    if choice.mode is CUDAGraphMode.FULL and choice.uniform_decode:
        return "replayed; captured when a batch of this size needs it for the second time"
    return f"launched: {SamplerLaunch.NO_DECODE_GRAPH.value}"
