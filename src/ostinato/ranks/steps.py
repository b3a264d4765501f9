"""One model on several ranks, step by step: rank 0 leads, the others follow.

The scheduler is on rank 0. It sends each step's plan to the others before it runs the step itself;
every rank brings its own request state up to date by it, chooses the same graph, and runs it. No
token is sent: all ranks have the same logits, and the noise of sampling is a function of seed and
position. So all ranks sample the same tokens and write them to their own state, and the next step
finds them there. Where the head is split its parts are gathered, and logits are equal to the bit;
with tensor parallelism of 1 each rank computes them whole, which is the same on GPUs of one kind.
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
from ostinato.scheduling.schedule_plan import IntArray, Plan

_NOTHING = np.empty(0, dtype=np.int64)


class RankRunner(ModelRunner):
    """The runner of one rank of ``world``. After ``begin``, closing it leaves the world."""

    def __init__(self, *args: Any, world: World, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world = world
        self._leave: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """All ranks are ready. If nobody closes this one, it leaves when it is no more."""
        self._leave = weakref.finalize(self, _leave, self._world, self.pool)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._leave()


class LeadingRunner(RankRunner):
    """Rank 0's runner: the other ranks do what it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._encoder = PlanEncoder()

    def run(self, plan: Plan) -> StepResult:
        # Started on one rank, a step is finished on all, or the ranks are out of step for good.
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(*self._encoder.encode(plan))
            return _AwaitedResult(super().run(plan), self._world)


class _AwaitedResult(StepResult):
    """The results of a step that all ranks take part in: waiting for them, one may wait for all."""

    def __init__(self, own: StepResult, world: World) -> None:
        self._own = own
        self._world = world

    def token_ids(self) -> IntArray:
        # Starting the step has looked at the processes.
        with uninterrupted(), self._world.together(processes=False):
            tokens = self._own.token_ids()
            # A step that was set free from a failed rank has no results.
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

    def run(self, plan: Plan) -> StepResult:
        raise SchedulingError(
            f"this is rank {self._world.rank}, and requests are for rank 0, which no other rank "
            "steps without; call generate or stream, on all ranks"
        )

    @torch.inference_mode()
    def follow(self) -> bytes | None:
        """Run what rank 0 says, until it shares a result, which is returned, or leaves: None."""
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
            pool.close()  # first: graphs hold the communicators that they captured
        if world.is_first and not world.symmetric:
            # Ranks that only serve do not know when to leave; those that run the script do.
            with contextlib.suppress(Exception), world.together():
                world.progress.announce()
                world.channel.send(Kind.CLOSE, _NOTHING)
    finally:
        world.close()
