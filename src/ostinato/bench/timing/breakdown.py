"""Breaks down the time of a step by the kernels of a profile. Pure: names and times in, sums out.

Kernels are classified by name: ours, those of cuBLAS and CUTLASS, and those that inductor and torch
generate; on the CPU, torch's operators. Any other is a small kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

GEMM, ATTENTION, SMALL, COPIES, GAPS = "GEMM", "attention", "small kernels", "copies", "gaps"
PARTS = (GEMM, ATTENTION, SMALL, COPIES, GAPS)

# Our kernels, in ``ops/triton`` and ``attention/triton``; a test finds any missing here.
KERNELS = {
    "accept_drafts_kernel": SMALL,
    "activate_and_mul_kernel": SMALL,
    "attend_kernel": ATTENTION,
    "best_kept_kernel": SMALL,
    "best_of_all_kernel": SMALL,
    "best_of_chunk_kernel": SMALL,
    "collect_candidates_kernel": SMALL,
    "combine_kernel": ATTENTION,
    "combine_latent_kernel": ATTENTION,
    "combine_ranks_kernel": ATTENTION,
    "conv_step_kernel": SMALL,
    "copy_logits_kernel": SMALL,
    "count_tokens_kernel": SMALL,
    "decode_kernel": ATTENTION,
    "down_row_kernel": GEMM,
    "expert_tile_kernel": GEMM,
    "find_cutoff_kernel": SMALL,
    "find_match_kernel": SMALL,
    "fold_kernel": GEMM,
    "gate_up_row_kernel": GEMM,
    "histogram_kernel": SMALL,
    "invariant_attend_kernel": ATTENTION,
    "invariant_gemm_kernel": GEMM,
    "latent_expand_kernel": ATTENTION,
    "latent_kernel": ATTENTION,
    "latent_plan_kernel": ATTENTION,
    "latent_store_kernel": ATTENTION,
    "layer_norm_kernel": SMALL,
    "load_inputs_kernel": SMALL,
    "logit_range_kernel": SMALL,
    "logprob_sums_kernel": SMALL,
    "lora_expand_gated_kernel": GEMM,
    "lora_expand_kernel": GEMM,
    "lora_norm_shrink_kernel": GEMM,
    "lora_shrink_kernel": GEMM,
    "lora_shrink_row_kernel": GEMM,
    "mma_kernel": GEMM,
    "output_norm_kernel": SMALL,
    "penalise_kernel": SMALL,
    "prefill_kernel": ATTENTION,
    "recurrent_step_kernel": ATTENTION,  # what these layers have in its place
    "rms_norm_kernel": SMALL,
    "rotary_store_kernel": ATTENTION,
    "rotate_heads_kernel": SMALL,
    "route_kernel": SMALL,
    "router_row_kernel": GEMM,
    "router_tile_kernel": GEMM,
    "row_kernel": GEMM,
    "store_kernel": ATTENTION,
    "store_outputs_kernel": SMALL,
    "store_resampled_kernel": SMALL,
    "stream_decode_kernel": ATTENTION,
    "tile_kernel": GEMM,
    "top_logprobs_kernel": SMALL,
    "write_drafts_kernel": SMALL,
}
# Other kernels: the first match wins. Inductor names a fused kernel after everything in it, GEMMs
# included, so it comes first; attention comes before GEMMs, since its kernels use CUTLASS too.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (SMALL, re.compile(r"^triton_(poi|red|per|for)_")),
    (COPIES, re.compile(r"^(memcpy|memset)|^aten::(copy_|_to_copy|fill_|zero_)$", re.I)),
    (ATTENTION, re.compile(r"atten|attend|flash|fmha|sdpa", re.I)),
    (GEMM, re.compile(r"gemm|gemv|nvjet|cutlass|cublas|split_?k|^triton_tem_", re.I)),
    (GEMM, re.compile(r"^aten::(linear|mm|addmm|bmm|baddbmm|matmul)$")),
)


class Interval(NamedTuple):
    """One kernel or copy as it ran; times in microseconds, on any one clock."""

    name: str
    start: float
    end: float


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    if name in KERNELS:
        return KERNELS[name]
    return next((part for part, pattern in _RULES if pattern.search(name)), SMALL)


def break_down(intervals: Iterable[Interval], *, num_steps: int) -> dict[str, Any]:
    """Microseconds per step and part, from the first start to the last end of ``num_steps`` steps.

    Where kernels overlap, as with programmatic dependent launch, the time counts once, for the one
    that started first, so the parts add up to the window. Gaps are when no kernel ran.
    """
    ordered = sorted(intervals, key=lambda each: (each.start, -each.end))
    parts = dict.fromkeys(PARTS, 0.0)
    kernels: dict[str, list[float]] = {}  # by name: count, exclusive time
    counts = dict.fromkeys(PARTS, 0)
    covered = ordered[0].start if ordered else 0.0  # everything before is accounted for
    begin = covered
    for name, start, end in ordered:
        parts[GAPS] += max(0.0, start - covered)
        own = max(0.0, end - max(start, covered))
        covered = max(covered, end)
        parts[part_of(name)] += own
        counts[part_of(name)] += 1
        kernel = kernels.setdefault(name, [0, 0.0])
        kernel[0] += 1
        kernel[1] += own
    by_time = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "window_us": (covered - begin) / num_steps,
        "parts": {
            part: {
                "us": time / num_steps,
                "count": None if part == GAPS else counts[part] / num_steps,
            }
            for part, time in parts.items()
        },
        "kernels": [
            {
                "name": name,
                "part": part_of(name),
                "count": count / num_steps,
                "us": time / num_steps,
            }
            for name, (count, time) in by_time
        ],
    }
