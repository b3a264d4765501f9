"""Timing, done the same way everywhere: warm up, interleave the subjects, report medians."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from ostinato.config import EngineConfig

T = TypeVar("T")


def median_seconds(
    subjects: Mapping[str, Callable[[], object]], *, repeats: int, calls: int = 1
) -> dict[str, float]:
    """Median seconds per call of each subject, measured in turns so that drift affects all."""
    for subject in subjects.values():
        subject()
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, subject in subjects.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                subject()
            elapsed = time.perf_counter() - start
            samples[name].append(elapsed / calls)
    synchronize()
    return {name: statistics.median(times) for name, times in samples.items()}


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result of ``call``, and its seconds until the device is done."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return result, time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_name(config: EngineConfig) -> str | Path:
    """What results call the model of ``config``."""
    return config.model or "SmolLM2-135M-Instruct (embedded)"


def machine() -> dict[str, Any]:
    """The machine that the numbers were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()
