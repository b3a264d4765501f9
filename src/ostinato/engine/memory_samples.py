"""The memory of an engine over time: a bounded number of samples that covers the whole run.

A sample is taken every ``period`` steps. When there are too many, every second one is dropped and
the period doubles, so a long run costs no more memory than a short one, and less time per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from ostinato.loading.free_memory import free_memory
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduling.scheduler import Scheduler

_FIRST_PERIOD = 8
_MOST_SAMPLES = 512
_GRAPH_BYTES_FOR_S = 1.0  # torch lists all its segments to find them


class MemorySample(NamedTuple):
    """One moment: ``at_s`` seconds since the engine was built.

    ``kv_blocks``: in use, of all replicas. ``graph_bytes``: memory of all graphs of this rank.
    ``free_bytes``: of its device, for any process; None if unknown. ``num_running``,
    ``num_waiting``: sequences.
    """

    at_s: float
    kv_blocks: int
    graph_bytes: int
    free_bytes: int | None
    num_running: int
    num_waiting: int


class MemorySamples:
    """Takes and keeps the samples of one engine."""

    def __init__(
        self,
        runner: ModelRunner,
        schedulers: Sequence[Scheduler],
        *,
        period: int = _FIRST_PERIOD,
        most: int = _MOST_SAMPLES,
    ) -> None:
        self.period = period
        self.samples: list[MemorySample] = []
        self._runner = runner
        self._schedulers = schedulers
        self._most = most
        self._built = perf_counter()
        self._graph_bytes, self._graph_bytes_at = 0, float("-inf")

    def take(self) -> None:
        """Add a sample of now. Waits for nothing."""
        self.samples.append(self.now())
        if len(self.samples) >= self._most:
            del self.samples[1::2]
            self.period *= 2

    def now(self) -> MemorySample:
        """The memory now; kept nowhere. ``graph_bytes`` may be a second old."""
        at, schedulers = perf_counter() - self._built, self._schedulers
        if at - self._graph_bytes_at >= _GRAPH_BYTES_FOR_S:
            pools = self._runner.pool, self._runner.samplers
            self._graph_bytes, self._graph_bytes_at = sum(each.num_bytes for each in pools), at
        allocators = [scheduler.allocator for scheduler in schedulers]
        return MemorySample(
            at_s=at,
            # Block 0 is for padding.
            kv_blocks=sum(each.num_blocks - 1 - each.num_free_blocks for each in allocators),
            graph_bytes=self._graph_bytes,
            free_bytes=_free_bytes(self._runner.state.device),
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory(device)
