"""Which graphs an engine will have, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ostinato.attention.base import AttentionBackend
from ostinato.config import EngineConfig
from ostinato.graphs.policy.modes import (
    AttentionCGSupport,
    CUDAGraphMode,
    ResolvedMode,
    resolve_mode,
)
from ostinato.graphs.policy.plan import CapturePlan, sequence_parallel_sizes, shift_sizes


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
    if config.graphs.mixed_capture_sizes is not None:
        separate = resolved.mode is not CUDAGraphMode.NONE  # the plan refuses modes without them
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
