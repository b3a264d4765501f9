"""The plan of an engine, its graphs and its eager steps, as rows of plain values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ostinato.engine.engine import Engine
from ostinato.graphs.capture.capture_loop import EntryReport
from ostinato.graphs.policy.dispatch import DispatchStats, RunTime
from ostinato.report.records import EagerRow, GraphRow, Plan

if TYPE_CHECKING:
    from ostinato.pooling.engine import PoolingEngine


def plan_of(engine: Engine | PoolingEngine) -> Plan:
    """What was planned and captured at the start."""
    plan, report = engine.runner.plan, engine.runner.capture_report
    requested, changed, attention, blocks = plan.mode, "", None, None
    if isinstance(engine, Engine):
        requested, changed = engine.resolved_mode.requested, engine.resolved_mode.reason or ""
        attention = engine.runner.backend.name
        blocks = engine.scheduler.allocator.num_blocks - 1  # block 0 is for padding
    decode = {entry.descriptor.num_tokens for entry in plan.entries if entry.descriptor.uniform}
    mixed = {entry.descriptor.num_tokens for entry in plan.entries if not entry.descriptor.uniform}
    return Plan(
        requested_mode=requested.name,
        mode=plan.mode.name,
        changed_because=changed or None,
        attention=attention,
        decode_sizes=sorted(decode),
        mixed_sizes=sorted(mixed),
        num_graphs=report.num_graphs,
        capture_s=report.seconds,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_kv_blocks=blocks,
        block_size=None if blocks is None else engine.config.block_size,
    )


def graph_rows(engine: Engine | PoolingEngine) -> list[GraphRow]:
    """The entries of the plan, in the order of capture."""
    stats, now = engine.runner.stats, time.monotonic()
    return [_row(each, stats, now) for each in engine.runner.capture_report.entries]


def eager_rows(stats: DispatchStats) -> Iterator[EagerRow]:
    """Eager steps by reason, most frequent first."""
    for reason, steps in stats.eager.most_common():
        if steps:
            took = stats.times.get(reason, RunTime())
            yield EagerRow(
                reason=reason.name,
                explanation=reason.value,
                steps=steps,
                timed_runs=took.num_runs,
                run_s=took.seconds,
            )


def _row(report: EntryReport, stats: DispatchStats, now: float) -> GraphRow:
    key = report.entry.descriptor
    last_used = stats.last_used.get(key)
    took = stats.times.get(key, RunTime())
    return GraphRow(
        name=f"{report.entry.mode.name}, {key.describe()}",
        mode=report.entry.mode.name,
        kind="decode" if key.uniform else "mixed",
        num_tokens=key.num_tokens,
        num_reqs=key.num_reqs,
        num_loras=key.num_active_loras,
        replays=stats.replays[key],
        padding_tokens=stats.padding[key],
        timed_runs=took.num_runs,
        run_s=took.seconds,
        num_bytes=report.num_bytes,
        bytes_by_kind={"pool": report.num_bytes, "executable": report.executable_bytes},
        capture_s=report.seconds,
        idle_s=None if last_used is None else max(0.0, now - last_used),
        error=report.error,
    )
