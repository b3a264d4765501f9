"""Runs one model on several ranks, step by step: rank 0 leads, the others follow.

The scheduler is on rank 0. It sends each step's plan to the others before it runs the step itself;
every rank updates its request state from the plan, chooses the same graph, and runs it. No token is
sent: all ranks have the same logits, and sampling noise is a function of seed and position. So all
ranks sample the same tokens and write them to their own state, where the next step finds them. A
sharded LM head is gathered, which makes logits bitwise equal; with tensor parallelism of 1 each
rank computes them in full, which gives equal results on GPUs of the same model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ostinato.errors import SchedulingError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.ranks.plan_message import Kind, PlanDecoder, PlanEncoder, to_bytes
from ostinato.ranks.world import World, uninterrupted
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.step_result import ResultRing, StepResult
from ostinato.scheduling.step_plan import IntArray, StepPlan

_NOTHING = np.empty(0, dtype=np.int64)


class RankRunner(ModelRunner):
    """One rank's runner in ``world``. After ``begin``, closing it leaves the world."""

    def __init__(self, *args: Any, world: World, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world = world
        self._leave: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """All ranks are ready. From now on a runner that is garbage-collected leaves the world."""
        self._leave = weakref.finalize(self, _leave, self._world, self.pool)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._leave()


class LeadingRunner(RankRunner):
    """Rank 0's runner: the other ranks repeat what it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._encoder = PlanEncoder()

    def run(self, plan: StepPlan) -> StepResult:
        # A step started on one rank must finish on all, or the ranks are out of step for good.
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(*self._encoder.encode(plan))
            return _AwaitedResult(super().run(plan), self._world)


class _AwaitedResult(StepResult):
    """The results of a step that all ranks run; waiting for them may mean waiting for any rank."""

    def __init__(self, own: StepResult, world: World) -> None:
        self._own = own
        self._world = world

    def token_ids(self) -> IntArray:
        # The processes were checked when the step started.
        with uninterrupted(), self._world.together(processes=False):
            tokens = self._own.token_ids()
            # A step aborted because of a failed rank has no results.
            self._world.check(processes=False)
            return tokens

    def logprobs(self, row: int, num_top: int) -> list[tuple[int, float]]:
        return self._own.logprobs(row, num_top)


class _NoResults(ResultRing):
    """For ranks whose tokens nothing reads: nothing is sent."""

    def send(self, *results: Any) -> StepResult:
        return StepResult()


class FollowingRunner(RankRunner):
    """Any other rank's runner: runs the plans that rank 0 sends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._decoder = PlanDecoder()
        self.results = _NoResults(self.plan.max_num_seqs, self.model.device)

    def run(self, plan: StepPlan) -> StepResult:
        raise SchedulingError(
            f"this is rank {self._world.rank}, but only rank 0 takes requests; call generate or "
            "stream, on all ranks"
        )

    @torch.inference_mode()
    def follow(self) -> bytes | None:
        """Run what rank 0 sends until it shares a result, which is returned, or leaves (None)."""
        with self._world.together():
            while True:
                kind, words = self._world.channel.receive()
                if kind is Kind.CLOSE:
                    return None
                if kind is Kind.RESULT:
                    return to_bytes(words)
                super().run(self._decoder.decode(kind, words))


def _leave(world: World, pool: GraphPool) -> None:
    try:
        with contextlib.suppress(Exception):
            pool.close()  # first, because graphs hold the communicators that they captured
        if world.is_first and not world.symmetric:
            # Ranks that only serve must be told to leave; ranks that run the script know.
            with contextlib.suppress(Exception), world.together():
                world.progress.announce()
                world.channel.send(Kind.CLOSE, _NOTHING)
    finally:
        world.close()
