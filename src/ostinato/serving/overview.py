"""What the dashboard shows of an engine: its plan, its graphs, the requests in flight.

Plain numbers and names, taken in the engine's thread between two steps. No text of any request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ostinato.llm import LLM
from ostinato.report.records import EagerRow, GraphRow, Plan
from ostinato.report.rows import eager_rows, graph_rows, plan_of
from ostinato.serving.engine_stats import engine_stats
from ostinato.serving.engine_thread import EngineThread
from ostinato.serving.records import EngineStats
from ostinato.serving.running_request import RunningRequest

MOST_REQUESTS = 100  # shown of those in flight; the counts are of all


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
class Overview:
    """Everything at one moment. ``graphs`` is in the order of capture."""

    stats: EngineStats
    plan: Plan
    graphs: list[GraphRow]
    eager: list[EagerRow]
    in_flight: list[InFlight]


def overview(llm: LLM, thread: EngineThread) -> Overview:
    """The overview now; called in the engine's thread."""
    now = time.monotonic()
    engine = llm.engine if llm.task == "generate" else llm.pooling
    return Overview(
        stats=engine_stats(llm, thread),
        plan=plan_of(engine),
        graphs=graph_rows(engine),
        eager=list(eager_rows(engine.runner.stats)),
        in_flight=[_in_flight(each, now) for each in thread.requests[:MOST_REQUESTS]],
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
