"""What every ``capture_model`` says and counts around the capture itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.graphs.policy.modes import CUDAGraphMode

logger = logging.getLogger(__name__)


def measured_capture(capture: Callable[[], CaptureReport], pool: GraphPool) -> int:
    """Run ``capture``, which captures into ``pool``; log and return the bytes it took.

    On CUDA these are of the whole device.
    """
    compilation_counter.num_gpu_runner_capture_triggers += 1
    start, bytes_before = time.perf_counter(), _used_bytes(pool)
    report = capture()
    taken = _used_bytes(pool) - bytes_before
    logger.info(
        "captured %d graphs in %.2f s, %.3f GiB",
        report.num_graphs,
        time.perf_counter() - start,
        taken / 2**30,
    )
    return taken


def warn_of_no_capture(num_planned: int, mode: CUDAGraphMode) -> None:
    """Say why ``capture_model`` captures nothing: all graphs exist, or none is planned."""
    if num_planned:
        logger.warning("nothing to capture: all %d graphs exist", num_planned)
    else:
        logger.warning("no graphs are captured: the graph mode (GraphConfig.mode) is %s", mode.name)


def _used_bytes(pool: GraphPool) -> int:
    if pool.device.type != "cuda":
        return pool.num_bytes
    # Not the device: that would break a capture in another engine's thread.
    torch.cuda.current_stream(pool.device).synchronize()
    free, total = torch.cuda.mem_get_info(pool.device)
    return total - free
