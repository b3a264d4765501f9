"""Counts, measures and logs a capture, in the same way for every ``capture_model``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.graphs.policy.graph_memory import GraphMemory, GraphMemoryReport
from ostinato.graphs.policy.modes import CUDAGraphMode

logger = logging.getLogger(__name__)


def measured_capture(capture: Callable[[], CaptureReport], pool: GraphPool) -> GraphMemory:
    """Run ``capture``, which captures into ``pool``; log and return the memory it took.

    On CUDA the total is of the whole device: another process there may change it in the meantime.
    """
    compilation_counter.num_gpu_runner_capture_triggers += 1
    pool.release_unused()  # of earlier work, which the capture would free as well
    backend = pool.backend
    start, used = time.perf_counter(), _used_bytes(pool)
    in_pool, workspaces = pool.num_bytes, backend.workspace_bytes()
    report = capture()
    known = GraphMemory(
        pool=pool.num_bytes - in_pool,
        executable=report.executable_bytes,
        buffers=report.buffer_bytes,
        workspaces=backend.workspace_bytes() - workspaces,
    )
    rest = 0 if used is None else (_used_bytes(pool) or 0) - used - known.total
    taken = replace(known, driver=rest)
    logger.info(
        "captured %d graphs in %.2f s, %s",
        report.num_graphs,
        time.perf_counter() - start,
        taken,
    )
    return taken


def compare_with_estimate(memory: GraphMemoryReport) -> None:
    """Log how much the graphs took against the estimate; a warning if it was too low."""
    level = logging.INFO if memory.is_within_estimate else logging.WARNING
    estimated, taken = memory.estimated, memory.taken
    logger.log(level, "memory of the graphs: estimated %s, taken %s", estimated, taken)


def warn_of_no_capture(num_planned: int, mode: CUDAGraphMode) -> None:
    """Say why ``capture_model`` captures nothing: all graphs exist, or none is planned."""
    if num_planned:
        logger.warning("nothing to capture: all %d graphs exist", num_planned)
    else:
        logger.warning("no graphs are captured: the graph mode (GraphConfig.mode) is %s", mode.name)


def _used_bytes(pool: GraphPool) -> int | None:
    """Memory in use on the whole device; None for the CPU, whose memory has other uses."""
    if pool.device.type != "cuda":
        return None
    # Not the device: that would break a capture in another engine's thread.
    torch.cuda.current_stream(pool.device).synchronize()
    free, total = torch.cuda.mem_get_info(pool.device)
    return total - free
