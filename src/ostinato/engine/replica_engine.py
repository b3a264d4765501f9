"""``ReplicaEngine``: an engine that runs several replicas of a model side by side.

Each replica has its own ranks, KV cache and scheduler. A step sends all their plans, then reads all
their results, so replicas compute at the same time. A request stays in the replica that it was
placed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple
from time import perf_counter

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.replica_stats import ReplicaStats
from ostinato.engine.requests.completion import Completion
from ostinato.engine.start import new_scheduler
from ostinato.engine.thread_use import one_thread
from ostinato.errors import SchedulingError
from ostinato.graphs.policy.dispatch import RunTime
from ostinato.ranks.steps import LeadingRunner
from ostinato.runner.step_result import StepResult
from ostinato.scheduling.placement import Placement
from ostinato.scheduling.step_plan import StepPlan

# A step in flight: the plan and the result of each replica, when it started, and where the time of
# replica 0 counts.
_Step = tuple[list[tuple[StepPlan, StepResult]], float, RunTime]


class ReplicaEngine(Engine):
    """An engine for ``data_parallel_size`` replicas; ``schedulers`` has one scheduler for each."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        for _ in range(1, config.data_parallel_size):
            scheduler = new_scheduler(config, self.model, self.runner)
            scheduler.drafts.stats = self.scheduler.drafts.stats  # counted together
            self.schedulers.append(scheduler)
        self._placement = Placement(self.schedulers)
        self._steps_in_flight: deque[_Step] = deque()

    @one_thread(is_part=True)
    def replica_stats(self) -> list[ReplicaStats]:
        """Counts of each replica of the model; ``sum`` adds them up."""
        return [ReplicaStats(*each) for each in self.sharing.call(self._count)]

    def _count(self) -> list[tuple[int, ...]]:
        counts = self._leader().replica_counts()
        return [
            astuple(ReplicaStats.of(scheduler, its_counts))
            for scheduler, its_counts in zip(self.schedulers, counts, strict=True)
        ]

    def _add(self, completion: Completion) -> None:
        self._check_open()
        self.lifecycle.check_awake()
        request = completion.request
        request.replica = self._placement.choose(request)
        self._emitter.completions[request.request_id] = completion
        self.schedulers[request.replica].add(request)

    def _step(self) -> list[Completion]:
        self._check_open()
        if self._emitter.queued:
            return self._emitter.emit()
        steps = self._steps_in_flight
        try:
            plans = [scheduler.schedule() for scheduler in self.schedulers]
            has_work = any(plan.num_tokens for plan in plans)
            if has_work:
                started, results = perf_counter(), self._leader().run_replicas(plans)
                run_time = self.runner.stats.run_time if plans[0].num_tokens else RunTime()
                steps.append((list(zip(plans, results, strict=True)), started, run_time))
            if not steps or (has_work and len(steps) <= self._num_ahead):
                return []
            step, started, run_time = steps.popleft()
            for scheduler, (plan, _) in zip(self.schedulers, step, strict=True):
                scheduler.prepare_commit(plan)
            tokens = [result.token_ids() for _, result in step]  # of all, before any is applied
            for scheduler, (plan, result), sampled in zip(
                self.schedulers, step, tokens, strict=True
            ):
                self._queue(scheduler.commit(plan, sampled), result)
            self._count_step(started, run_time)
        except BaseException:
            steps.clear()
            self._emitter.take_back_unreported()
            for scheduler in self.schedulers:
                scheduler.rollback()
            self._emitter.end_unreported()
            raise
        self._placement.loads = None  # requests have grown
        return self._emitter.emit()

    def _leader(self) -> LeadingRunner:
        if not isinstance(self.runner, LeadingRunner):
            raise SchedulingError(
                "only rank 0 takes requests; call generate or stream, on all ranks"
            )
        return self.runner
