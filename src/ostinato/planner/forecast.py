"""``ostinato plan parallel``: predicts step times, thresholds and loads of several GPUs from one.

A rank's compute time comes from a result of ``ostinato bench parallel`` or else from a roofline;
communication comes from formulas. All assumptions are part of the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.shapes import shape_config
from ostinato.parallel.layout import ParallelLayout
from ostinato.planner.communication import Interconnect
from ostinato.planner.compute import Measured, Roofline
from ostinato.planner.cost import Compute, LayoutCost, default_layouts, layouts_of
from ostinato.planner.expert_parallel import ExpertParallelCost
from ostinato.planner.predict import loads, predict

MODEL, DTYPE, CONTEXT, MAX_TOKENS = "llama-3.1-8b", "bfloat16", 512, 2048
# Defaults of an H200, in GB/s and µs.
BANDWIDTH, LATENCY = 450.0, 10.0
_BANDWIDTH_FROM = (
    "NVLink 4 of an H200: 18 links of 25 GB/s each way; NCCL reaches about 80% of it with large "
    "tensors, so try --bandwidth 370 too"
)
_LATENCY_FROM = (
    "typical of NCCL's small all-reduces within one machine, in CUDA graphs; measure yours with "
    "nccl-tests"
)
# Defaults of an H200, in GB/s and TFLOP/s.
MEMORY_BANDWIDTH = 4390.0
_MEMORY_FROM = "a plain read of an H200, measured by `ostinato bench decode`"
PEAKS = {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0}
_PEAK_FROM = "an H200's data sheet, without sparsity"
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to predict. None: the default, or the measured value."""

    source: Path | None = None
    model: str | None = None
    dtype: str | None = None
    gpus: Sequence[int] | None = None
    layouts: Sequence[ParallelLayout] | None = None
    bandwidth: float | None = None
    latency: float | None = None
    memory_bandwidth: float | None = None
    peak: float | None = None
    context: int | None = None
    max_tokens: int | None = None


def run(question: Question) -> dict[str, Any]:
    """The predictions as plain data, with the assumptions in words."""
    result = None if question.source is None else _read(question.source)
    measured = None if result is None else Measured(result, repr(str(question.source)))
    model, dtype = _subject(question, measured)
    config = DecoderConfig.from_hf(shape_config(model))
    compute, from_what = (
        _roofline(question, config, dtype)
        if measured is None
        else (measured, _about_measured(result, measured))
    )
    bandwidth = BANDWIDTH if question.bandwidth is None else question.bandwidth
    latency = LATENCY if question.latency is None else question.latency
    interconnect = Interconnect(bandwidth=bandwidth * 1e9, latency=latency / 1e6)
    max_tokens = _max_tokens(question.max_tokens, measured)
    costs = [
        LayoutCost(
            config=config,
            layout=layout,
            itemsize=_ITEMSIZES[dtype],
            compute=compute,
            interconnect=interconnect,
            max_tokens=max_tokens,
        )
        for layout in _layouts(question, config, measured)
    ]
    spread = _spread(costs)
    shown = _TOKENS if measured is None else measured.num_tokens
    sizes = [*(size for size in shown if size < max_tokens), max_tokens]
    return {
        "command": "ostinato plan parallel",
        "model": model,
        "dtype": dtype,
        "compute": "measured" if measured else "roofline",
        "bandwidth_gb_s": bandwidth,
        "latency_us": latency,
        "max_tokens": max_tokens,
        "assumptions": [*from_what, *_about_communication(question, bandwidth, latency),
                        *_about_experts(config, spread), *_about_steps(max_tokens)],
        **predict(costs, sizes, spread),
    }  # fmt: skip


def _spread(costs: Sequence[LayoutCost]) -> list[ExpertParallelCost]:
    """The numbers of GPUs of ``costs`` as replicas with the experts spread over them."""
    counts, first = dict.fromkeys(cost.layout.world_size for cost in costs), costs[0]
    compute = first.compute
    assert isinstance(compute, Roofline | Measured), "one of the two computes"
    return [
        ExpertParallelCost(
            config=first.config,
            num_ranks=count,
            itemsize=first.itemsize,
            compute=compute,
            interconnect=first.interconnect,
        )
        for count in counts
        if compute.spreads_experts_over(count)
    ]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read a result from {str(path)!r}: {error}") from error


def _subject(question: Question, measured: Measured | None) -> tuple[str, str]:
    """Model and dtype. A measurement brings its own, and rejects roofline numbers."""
    if measured is not None:
        for name, asked, found in (
            ("--model", question.model, measured.model),
            ("--dtype", question.dtype, measured.dtype),
        ):
            if asked is not None and asked != found:
                raise ConfigError(f"{name} is {asked}, but {found} was measured; omit it")
        for name, value in (
            ("--memory-bandwidth", question.memory_bandwidth),
            ("--peak", question.peak),
            ("--context", question.context),
        ):
            if value is not None:
                raise ConfigError(f"{name} has no effect with --from; omit it")
        model, dtype = measured.model, measured.dtype
    else:
        model, dtype = question.model or MODEL, question.dtype or DTYPE
    if dtype not in _ITEMSIZES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose {', '.join(_ITEMSIZES)}")
    return model, dtype


def _layouts(
    question: Question, config: DecoderConfig, measured: Measured | None
) -> list[ParallelLayout]:
    if question.gpus is not None and question.layouts is not None:
        raise ConfigError("both --gpus and --layouts were given; give only one of them")
    if question.layouts is not None:
        return list(dict.fromkeys(question.layouts))
    if question.gpus is None:
        return default_layouts(config) if measured is None else measured.layouts
    found: list[ParallelLayout] = []
    for count in dict.fromkeys(question.gpus):
        check_positive_int("number of GPUs", count)
        if measured is None:
            found += layouts_of(config, count)
            continue
        fitting = [layout for layout in measured.layouts if layout.world_size == count]
        if not fitting:
            counts = sorted({layout.world_size for layout in measured.layouts})
            raise ConfigError(
                f"no layout of {count} GPUs was measured, only of {', '.join(map(str, counts))}"
            )
        found += fitting
    return found


def _max_tokens(asked: int | None, measured: Measured | None) -> int:
    if asked is None:
        return MAX_TOKENS if measured is None else measured.max_tokens
    check_positive_int("--max-tokens", asked)
    return asked


def _roofline(question: Question, config: DecoderConfig, dtype: str) -> tuple[Compute, list[str]]:
    memory, peak = question.memory_bandwidth, question.peak
    context = CONTEXT if question.context is None else question.context
    lines = [
        "compute: a roofline; GEMMs, experts, attention and the head each take the longer of reads "
        "(weights, keys and values) and their arithmetic; activations, small kernels and launches "
        "take no time, so real steps take longer",
        f"memory: {_stated(memory, MEMORY_BANDWIDTH, 'GB/s', _MEMORY_FROM)}",
        f"arithmetic: {_stated(peak, PEAKS[dtype], 'TFLOP/s', _PEAK_FROM)}",
        f"batches: {_batches(context)}",
    ]
    compute = Roofline(
        config=config,
        itemsize=_ITEMSIZES[dtype],
        bandwidth=(MEMORY_BANDWIDTH if memory is None else memory) * 1e9,
        flops=(PEAKS[dtype] if peak is None else peak) * 1e12,
        context=context,
    )
    return compute, lines


def _about_measured(result: Any, measured: Measured) -> list[str]:
    machine = measured.machine
    where = machine.get("gpu") or machine.get("cpu") or "an unknown machine"
    return [
        f"compute: measured on {where}, torch {machine.get('torch')}, {machine.get('date')}, by "
        f"`{result.get('command', 'ostinato bench parallel')}`; linear between the measured sizes",
        f"batches: {_batches(measured.context)}",
    ]


def _batches(context: int) -> str:
    return (
        f"decode is one token per request, which attends to {context} keys; prefill is one prompt "
        "from its beginning"
    )


def _about_communication(question: Question, bandwidth: float, latency: float) -> list[str]:
    return [
        "interconnect: "
        + _stated(question.bandwidth, bandwidth, "GB/s per GPU and direction", _BANDWIDTH_FROM),
        "collective: "
        + _stated(question.latency, latency, "µs and its bytes / bandwidth", _LATENCY_FROM),
        "bytes: an all-reduce of n GPUs moves 2(n-1)/n of its tensor, twice per layer with TP and "
        "in the shift model, and once for the embedding; an all-to-all (n-1)/n, twice per layer "
        "with SP; an all-gather n-1 parts, for the hidden states with SP, the logits with TP, and "
        "with SP for the rows that all heads of latent attention share, once per layer",
        "head: logits come from the base model's head, split over TP only, in both models",
    ]


def _about_experts(config: DecoderConfig, spread: Sequence[ExpertParallelCost]) -> list[str]:
    experts = config.experts
    if experts is None:
        return []
    count, top_k = experts.num_experts, experts.options.top_k
    lines = [
        f"experts: routers choose {top_k} of {count} evenly, so T tokens touch "
        f"{count}(1 - (1 - {top_k}/{count})^T) of them, whose weights are read; with TP and in the "
        "shift model each expert is split by its width, and all-reduces stay as they are"
    ]
    if spread:
        lines.append(
            "EP: replicas of one GPU with the experts spread over them (enable_expert_parallel); "
            "each has an equal part of a batch's tokens; per layer an all-gather of n-1 parts "
            "brings all of them to every GPU, and an all-to-all takes results back; loads are even"
        )
    else:
        lines.append("EP: not predicted; not measured, or the GPUs do not divide the experts")
    return lines


def _about_steps(max_tokens: int) -> list[str]:
    described = "; ".join(
        f"{load.name} is {load.num_reqs} requests of {load.prompt_tokens} tokens that generate "
        f"{load.output_tokens}"
        for load in loads(max_tokens)
    )
    return [
        "step: computation and communication in sequence; no time for the host, sampling, or "
        "padding to captured sizes (the base model is padded to a multiple of SP)",
        f"threshold: the one with the smallest sum of step times over batches of 1 to {max_tokens} "
        "tokens, decode and prefill weighted equally; 0 if the shift model never pays off",
        f"loads: {described}; prompts fill steps of {max_tokens} tokens, then all decode together",
    ]


def _stated(given: float | None, default: float, unit: str, origin: str) -> str:
    if given is not None:
        return f"{given:g} {unit} (given)"
    return f"{default:g} {unit} ({origin})"
