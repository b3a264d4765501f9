"""What a person wants to see of an engine: its plan, its graphs, and what it is working on.

Plain numbers and names, taken in the engine's thread between two steps. No text of any request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ostinato.graphs.capture.capture_loop import CaptureReport, EntryReport
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.llm import LLM
from ostinato.serving.engine_stats import engine_stats
from ostinato.serving.engine_thread import EngineThread
from ostinato.serving.records import EngineStats
from ostinato.serving.running_request import RunningRequest

MOST_REQUESTS = 100  # shown of those in flight; the counts are of all


@dataclass(frozen=True, kw_only=True)
class GraphRow:
    """One entry of the capture plan. ``replays``, and ``padding_tokens`` in these.

    ``num_bytes``: what its capture added to the memory of all graphs; they share it, so most add
    little. ``idle_s``: seconds since the last replay; None: none yet. ``error``: why it has no
    graph, if its capture failed.
    """

    mode: str
    kind: str
    num_tokens: int
    num_reqs: int | None
    num_loras: int
    replays: int
    padding_tokens: int
    num_bytes: int
    idle_s: float | None
    error: str | None

    @property
    def padding_fraction(self) -> float:
        """The fraction of all replayed rows that was padding."""
        total = self.replays * self.num_tokens
        return self.padding_tokens / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A request that has not ended. ``state``: waiting, prefill or decode."""

    request_id: str
    state: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided at the start. ``changed_because``: why the mode is not the requested one."""

    requested_mode: str
    mode: str
    changed_because: str | None
    attention: str | None
    decode_sizes: list[int]
    mixed_sizes: list[int]
    num_graphs: int
    capture_s: float
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int | None
    block_size: int | None


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Everything at one moment. ``graphs`` is in the order of capture."""

    stats: EngineStats
    plan: Plan
    graphs: list[GraphRow]
    in_flight: list[InFlight]


def overview(llm: LLM, thread: EngineThread) -> Overview:
    """The overview now; called in the engine's thread."""
    now = time.monotonic()
    runner = llm.engine.runner if llm.task == "generate" else llm.pooling.runner
    return Overview(
        stats=engine_stats(llm, thread),
        plan=_plan(llm, runner.plan, runner.capture_report),
        graphs=[_row(each, runner.stats, now) for each in runner.capture_report.entries],
        in_flight=[_in_flight(each, now) for each in thread.requests[:MOST_REQUESTS]],
    )


def _plan(llm: LLM, plan: CapturePlan, report: CaptureReport) -> Plan:
    requested, changed, attention, blocks = plan.mode, "", None, None
    if llm.task == "generate":
        engine = llm.engine
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
        block_size=None if blocks is None else llm.config.block_size,
    )


def _row(report: EntryReport, stats: DispatchStats, now: float) -> GraphRow:
    key = report.entry.descriptor
    last_used = stats.last_used.get(key)
    return GraphRow(
        mode=report.entry.mode.name,
        kind="decode" if key.uniform else "mixed",
        num_tokens=key.num_tokens,
        num_reqs=key.num_reqs,
        num_loras=key.num_active_loras,
        replays=stats.replays[key],
        padding_tokens=stats.padding[key],
        num_bytes=report.num_bytes,
        idle_s=None if last_used is None else max(0.0, now - last_used),
        error=report.error,
    )


def _in_flight(request: RunningRequest, now: float) -> InFlight:
    state = "waiting" if request.is_waiting else "decode" if request.has_tokens else "prefill"
    return InFlight(
        request_id=request.request_id,
        state=state,
        num_prompt_tokens=len(request.prompt.token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_generated_tokens=request.num_generated_tokens,
        age_s=now - request.arrived,
    )
