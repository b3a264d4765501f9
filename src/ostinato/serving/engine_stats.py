"""Takes the counts of an engine between two of its steps."""

from __future__ import annotations

from collections import Counter

from ostinato.engine.replica_stats import ReplicaStats
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.llm import LLM
from ostinato.scheduling.scheduler import Scheduler
from ostinato.serving.engine_thread import EngineThread
from ostinato.serving.records import EngineStats


def engine_stats(llm: LLM, thread: EngineThread) -> EngineStats:
    """The counts now; called in the engine's thread."""
    verified = llm.verification
    if llm.task != "generate":
        runner = llm.pooling.runner
        stats = runner.stats
        return EngineStats(
            replays=_replays(stats),
            eager=_eager(stats),
            replayed_tokens=stats.replayed_tokens,
            padding_tokens=stats.padding_tokens,
            graph_bytes=runner.pool.num_bytes,
            verified_steps=verified.num_compared,
            quarantined_graphs=len(verified.mismatches),
        )
    engine = llm.engine
    stats = engine.runner.stats
    totals = sum(engine.replica_stats(), ReplicaStats())
    drafts = engine.scheduler.drafts.stats  # of all replicas
    requests = thread.requests
    return EngineStats(
        num_running=totals.num_running,
        num_waiting=totals.num_waiting,
        kv_cache_usage=_usage(engine.schedulers),
        num_preemptions=sum(each.num_preemptions for each in engine.schedulers),
        prompt_tokens=thread.prompt_tokens
        + sum(len(each.prompt.token_ids) for each in requests if each.has_tokens),
        generation_tokens=thread.generated_tokens
        + sum(each.num_generated_tokens for each in requests),
        prefix_query_tokens=totals.prefix_query_tokens,
        prefix_hit_tokens=totals.prefix_hit_tokens,
        draft_runs=drafts.num_runs,
        draft_tokens=drafts.num_drafts,
        accepted_tokens=drafts.num_accepted,
        replays=_replays(stats),
        eager=_eager(stats),
        replayed_tokens=stats.replayed_tokens,
        padding_tokens=stats.padding_tokens,
        graph_bytes=engine.runner.pool.num_bytes + engine.runner.samplers.num_bytes,
        masked_steps=engine.runner.samplers.stats.masked_steps,
        verified_steps=verified.num_compared,
        quarantined_graphs=len(verified.mismatches),
    )


def _usage(schedulers: list[Scheduler]) -> float:
    total = free = 0
    for scheduler in schedulers:
        total += scheduler.allocator.num_blocks - 1  # block 0 is for padding
        free += scheduler.allocator.num_free_blocks
    return 1 - free / total


def _replays(stats: DispatchStats) -> dict[str, int]:
    """Steps through graphs by mode. Only the keys of FULL graphs have a number of requests."""
    counts: Counter[str] = Counter()
    for key, num_replays in stats.replays.items():
        mode = CUDAGraphMode.PIECEWISE if key.num_reqs is None else CUDAGraphMode.FULL
        counts[mode.name] += num_replays
    return dict(counts)


def _eager(stats: DispatchStats) -> dict[str, int]:
    return {reason.name: count for reason, count in stats.eager.items() if count}
