"""Collects the report of a run from its engine, between two steps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ostinato.engine.engine import Engine
from ostinato.engine.memory_samples import MemorySample
from ostinato.environment import environment
from ostinato.report.pictures import draw_graphs
from ostinato.report.records import Memory, RunReport
from ostinato.report.rows import eager_rows, graph_rows, plan_of

if TYPE_CHECKING:
    from ostinato.pooling.engine import PoolingEngine


def collect_report(engine: Engine | PoolingEngine) -> RunReport:
    """The report of ``engine`` so far. Reads the nodes of all graphs, which takes a while."""
    runner, stats = engine.runner, engine.runner.stats
    samples: list[MemorySample] = []
    graph_bytes = runner.pool.num_bytes
    if isinstance(engine, Engine):
        samples = [*engine.memory.samples, engine.memory.now()]
        graph_bytes += engine.runner.samplers.num_bytes
    return RunReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=str(engine.model_path or engine.config.model),
        task="generate" if isinstance(engine, Engine) else engine.task,
        environment=dict(environment()),
        plan=plan_of(engine),
        graphs=graph_rows(engine),
        eager=list(eager_rows(stats)),
        replayed_tokens=stats.replayed_tokens,
        padding_tokens=stats.padding_tokens,
        graph_bytes=graph_bytes,
        memory=_columns(samples),
        pictures=draw_graphs(runner.ledger),
        num_compared=runner.verification.num_compared,
        mismatches=[str(each) for each in runner.verification.mismatches],
    )


def _columns(samples: list[MemorySample]) -> Memory:
    return Memory(
        at_s=[round(each.at_s, 4) for each in samples],
        kv_blocks=[each.kv_blocks for each in samples],
        graph_bytes=[each.graph_bytes for each in samples],
        free_bytes=[each.free_bytes for each in samples],
        num_running=[each.num_running for each in samples],
        num_waiting=[each.num_waiting for each in samples],
    )
