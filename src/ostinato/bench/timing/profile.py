"""``ostinato bench decode --profile``: a few steady decode steps under torch's profiler.

The breakdown of a step comes from the profile. Step and host times are measured without the
profiler, which slows the host down several times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from ostinato.bench.timing.breakdown import GAPS, Interval, break_down
from ostinato.bench.timing.measure import synchronize
from ostinato.engine.engine import Engine
from ostinato.errors import ConfigError
from ostinato.llm import LLM
from ostinato.paths import check_writable
from ostinato.sampling_params import SamplingParams

_STEPS = 16
_SETTLE = 4  # steps until all are alike
_SUFFIXES = (".json.gz", ".json")


def check_path(path: Path) -> None:
    """Raise now, not after minutes of measuring, if traces cannot be written to ``path``."""
    if not path.name.endswith(_SUFFIXES):
        raise ConfigError(f"a Chrome trace is a .json or .json.gz file, got {path.name!r}")
    check_writable(path)


def trace_path(path: Path, batch: int) -> Path:
    """The file of one batch: trace.json becomes trace.batch8.json."""
    suffix = next(suffix for suffix in _SUFFIXES if path.name.endswith(suffix))
    return path.with_name(f"{path.name.removesuffix(suffix)}.batch{batch}{suffix}")


def prompt_len_for(context: int) -> int:
    """The prompt length with which the profiled steps attend to about ``context`` keys."""
    return max(1, context - _SETTLE - 2 * _STEPS - _STEPS // 2)


def longest_for(context: int, *, batch: int, max_num_batched_tokens: int) -> int:
    """The longest sequence of a profile around ``context`` keys; no request finishes during it.

    The first prompts already generate tokens while the remaining prompts run.
    """
    prompt_len = prompt_len_for(context)
    prefill = -(-batch * prompt_len // max(1, max_num_batched_tokens - batch))
    return prompt_len + prefill + _SETTLE + 3 * _STEPS + 4


def profile_decode(llm: LLM, batch: int, *, context: int, path: Path) -> dict[str, Any]:
    """Break down one decode step, at ``batch`` sequences of about ``context`` tokens.

    Writes a Chrome trace. ``host_us`` is the duration of ``step`` when all earlier work has
    finished: the host's own time, unless ``step`` waits for the work that it starts. ``idle_us`` is
    the time of an unprofiled step minus its kernels.
    """
    engine, trace = llm.engine, trace_path(path, batch)
    with _decoding(engine, batch, prompt_len_for(context)):
        step_us = statistics.median(_step_us(engine) for _ in range(_STEPS))
        host_us = statistics.median(_step_us(engine, idle=True) for _ in range(_STEPS))
        synchronize()
        with torch.profiler.profile(activities=_activities(), acc_events=True) as profiler:
            for _ in range(_STEPS):
                engine.step()
            synchronize()
    profiler.export_chrome_trace(str(trace))
    parts = break_down(_intervals(profiler, engine.model.device), num_steps=_STEPS)
    busy_us = parts["window_us"] - parts["parts"][GAPS]["us"]
    return {
        "batch": batch,
        "context": context,
        "num_steps": _STEPS,
        "trace": trace.name,
        "step_us": step_us,
        "idle_us": max(0.0, step_us - busy_us),
        "host_us": host_us,
        **parts,
    }


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


@contextmanager
def _decoding(engine: Engine, batch: int, prompt_len: int) -> Iterator[None]:
    """Hold ``batch`` sequences in the engine, all past their prompts; abort them afterwards."""
    source = random.Random(batch)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    completions = []
    for _ in range(batch):
        prompt = [source.randrange(engine.model.vocab_size) for _ in range(prompt_len)]
        completions += engine.prepare_request(prompt, params)
    try:
        for completion in completions:
            engine.add(completion)
        while not all(completion.output.token_ids for completion in completions):
            engine.step()
        for _ in range(_SETTLE):
            engine.step()
        yield
        if any(completion.finished for completion in completions):
            raise ConfigError(
                f"sequences reached max_model_len {engine.max_model_len} before the profile was "
                "complete; raise it, or leave it unset"
            )
    finally:
        for completion in completions:
            if not completion.finished:
                engine.abort(completion)


def _step_us(engine: Engine, *, idle: bool = False) -> float:
    if idle:
        synchronize()
    start = time.perf_counter()
    engine.step()
    return (time.perf_counter() - start) * 1e6


def _intervals(profiler: torch.profiler.profile, device: torch.device) -> Iterator[Interval]:
    """Kernels and copies on a GPU; on the CPU, operators not called by another operator."""
    on_cuda = device.type == "cuda"
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    for event in profiler.events() or []:
        annotation = getattr(event, "is_user_annotation", False)
        if event.device_type != wanted or annotation or (not on_cuda and event.cpu_parent):
            continue
        yield Interval(event.name, event.time_range.start, event.time_range.end)
