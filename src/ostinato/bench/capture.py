"""``ostinato bench capture``: what start-up, capture and the ledger cost in each graph mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.bench.timing.measure import machine, model_name
from ostinato.config import EngineConfig
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.llm import LLM


def run(config: EngineConfig, *, modes: Sequence[str]) -> dict[str, Any]:
    """Build the engine once per mode; the process's first build also pays for imports."""
    parsed = [CUDAGraphMode.parse(mode) for mode in modes]  # check all before building the first
    rows = []
    for mode in parsed:
        graphs = replace(config.graphs, mode=mode)
        start = time.perf_counter()
        with LLM.from_config(replace(config, graphs=graphs)) as llm:
            ready = time.perf_counter() - start
            runner, ledger = llm.engine.runner, llm.ledger()
            rows.append(
                {
                    "mode": llm.engine.resolved_mode.mode.name,
                    "graphs": runner.capture_report.num_graphs,
                    "capture_s": runner.capture_report.seconds,
                    "bytes": runner.capture_bytes,
                    "ready_s": ready,
                    "check_ms": _milliseconds(ledger.check),
                    "thorough_check_ms": _milliseconds(partial(ledger.check, thorough=True)),
                    "addresses": {kind.value: count for kind, count in ledger.count().items()},
                }
            )
    return {
        "command": "ostinato bench capture",
        "machine": machine(),
        "model": model_name(config),
        "rows": rows,
    }


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
