"""The planner against the default ladder on the three workloads, with costs that were measured.

ostinato plan graphs --model llama-3.2-1b --random-weights --trace ... --save-costs costs.json
python benchmarks/planner_traces.py costs.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ostinato.graphs.policy.choose_sizes import GraphLimits
from ostinato.planner.graphs.observed import shapes_of_trace
from ostinato.planner.graphs.plan import plan_graphs
from ostinato.planner.graphs.step_costs import StepCosts
from ostinato.planner.graphs.trace import WORKLOADS, generate_trace

NUM_REQUESTS, SEED = 400, 0
LIMITS = (8, 16, 24, 48)


def main(path: Path) -> None:
    """Print one line of JSON for each workload and limit."""
    costs = StepCosts.read(path)
    for name in WORKLOADS:
        shapes = shapes_of_trace(generate_trace(name, NUM_REQUESTS, SEED), costs)
        for max_graphs in LIMITS:
            result = plan_graphs(shapes, costs, GraphLimits(max_graphs=max_graphs))
            row = {
                "workload": name,
                "max_graphs": max_graphs,
                "steps": result["steps"],
                "planned_ms": round(result["planned"]["ms_per_step"], 4),
                "default_ms": round(result["default"]["ms_per_step"], 4),
                "default_graphs": result["default"]["graphs"],
                "eager_ms": round(result["eager_ms_per_step"], 4),
                "gain": round(result["gain"], 4),
                "planned_mib": round(result["planned"]["bytes"] / 2**20),
                "default_mib": round(result["default"]["bytes"] / 2**20),
                "sizes": result["planned"]["sizes"],
            }
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
