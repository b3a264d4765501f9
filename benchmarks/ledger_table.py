"""What the ledger sees in the graphs of a model, and what reading it costs.

    python benchmarks/ledger_table.py --model llama-3.2-1b --sizes 1 8 64

Prints, by kernel: nodes, words that may be addresses, addresses by kind, and tensor maps; then the
memory without an owner, by kernel; then the times of both checks.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from ostinato import LLM, GraphConfig, MemoryKind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a named shape, with random weights")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--mode", default=None)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    graphs = GraphConfig(capture_sizes=options.sizes, mode=options.mode)
    with LLM(
        options.model, random_weights=True, device=options.device, graphs=graphs, max_model_len=1024
    ) as llm:
        report = llm.engine.runner.capture_report
        print(f"captured {report.num_graphs} graphs in {report.seconds:.2f} s")
        ledger = llm.ledger()
        records = timed("reading all nodes", ledger.graphs)
        timed("check()", ledger.check)
        timed("check(thorough=True)", lambda: ledger.check(thorough=True))
        show(records)


def timed(name: str, run: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = run()
    print(f"{name}: {(time.perf_counter() - start) * 1e3:.1f} ms")
    return result


def show(records: list[Any]) -> None:
    kernels: defaultdict[str, Counter[str]] = defaultdict(Counter)
    unknown: Counter[tuple[str, str]] = Counter()
    for record in records:
        held = ", ".join(f"{count} {kind.value}" for kind, count in record.count().items())
        logged = sum(node.operator is not None for node in record.nodes)
        print(f"{record.name}: {len(record.nodes)} nodes, {logged} with an operator; {held}")
        for node in record.nodes:
            row = kernels[node.name]
            row["nodes"] += 1
            row["tensor maps"] += node.hides_addresses
            for each in node.addresses:
                row[each.kind.value] += 1
                row["only seen by operator"] += each.where.startswith("given")
                if each.kind is MemoryKind.UNKNOWN:
                    unknown[node.name, each.where] += 1
    for name, row in sorted(kernels.items(), key=lambda item: -item[1]["nodes"]):
        print(f"{name[:90]:90} " + ", ".join(f"{count} {what}" for what, count in row.items()))
    for (name, where), count in unknown.most_common(30):
        print(f"unknown: {count:5}  {where:24} {name[:80]}")


if __name__ == "__main__":
    main()
