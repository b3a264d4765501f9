"""Tables for the results of ``ostinato bench serve``."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ostinato.cli.tables.bench_tables import latencies, new_table


def serve_tables(results: dict[str, Any]) -> list[RenderableType]:
    rate = results["rate"]
    arrival = "all at once" if rate is None else f"{rate:g} requests/s"
    title = f"{results['model']}: {results['mix']} x {results['scale']:g}, {arrival}"
    limits = _limits(results)
    good = ("good\n/s",) if limits else ()
    rates = new_table(
        title,
        "",
        "whole\nanswers",
        "requests\n/s",
        "seconds",
        "output\ntokens/s",
        "all\ntokens/s",
        *good,
    )
    times = new_table("Milliseconds: p50 / p90 / p99", "", "first token", "per output token", "gap")
    remarks = [Text(f"good: {limits}")] if limits else []
    for row in results["rows"]:
        cells = [
            f"{row['whole']}/{row['num_requests']}",
            f"{row['requests_per_s']:.2f}",
            f"{row['duration_s']:.2f}",
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
        ]
        goodput = row["goodput_requests_per_s"]
        if limits:
            cells.append("" if goodput is None else f"{goodput:.2f}")
        rates.add_row(row["server"], *cells)
        if row["ttft_ms"] is not None:
            times.add_row(row["server"], *latencies(row))
        for failure, count in row["failures"].items():
            remarks.append(Text(f"{row['server']}: {count} times: {failure}", style="red"))
    for name, why in results.get("failed", {}).items():
        remarks.append(Text(f"{name} was not measured: {why}", style="red"))
    if "of_offline" in results:
        remarks.append(
            Text(
                f"AsyncLLM: {results['of_offline']:.1%} of the offline throughput (LLM.generate), "
                f"{results['of_engine']:.1%} of the engine's with the same arrivals"
            )
        )
    return [rates, times, *remarks]


def _limits(results: dict[str, Any]) -> str:
    named = (("first token", "ttft_limit_ms"), ("per output token", "tpot_limit_ms"))
    return ", ".join(
        f"{name} within {results[key]:g} ms" for name, key in named if results[key] is not None
    )
