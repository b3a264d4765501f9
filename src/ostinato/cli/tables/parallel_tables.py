"""Tables for ``bench parallel`` and ``plan parallel``, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def bench_tables(results: dict[str, Any]) -> list[RenderableType]:
    """For each layout: milliseconds of base and shift by number of tokens."""
    parts: list[RenderableType] = [Text(f"communication is {results['communication']}")]
    for (sp, tp), rows in groupby(results["rows"], key=lambda row: (row["sp"], row["tp"])):
        title = f"{results['model']}, {results['dtype']}, SP {sp} x TP {tp}: ms of one rank"
        table = _table(title, "tokens", "decode\nbase", "\nshift", "prefill\nbase", "\nshift")
        by_size: dict[int, dict[str, dict[str, float]]] = {}
        for row in rows:
            by_size.setdefault(row["num_tokens"], {})[row["kind"]] = row
        for size, kinds in by_size.items():
            times = [kinds[kind][f"{model}_ms"] for kind in kinds for model in ("base", "shift")]
            table.add_row(f"{size:,}", *map(_ms, times))
        parts.append(table)
    if results["expert_parallel"]:
        parts.append(_experts_table("ms of one rank", results["expert_parallel"]))
    return parts


def plan_tables(results: dict[str, Any]) -> list[RenderableType]:
    """The assumptions, then steps, layouts and loads."""
    title = f"{results['model']}, {results['dtype']}, {results['compute']}"
    lines: list[RenderableType] = [Text(f"{title}: predicted under these assumptions", "bold")]
    for line in results["assumptions"]:
        topic, _, text = line.partition(": ")
        lines.append(Text.assemble((f"- {topic}: ", "bold"), text))
    gpus = list(dict.fromkeys(layout["gpus"] for layout in results["layouts"]))
    steps = [_steps_table(count, results) for count in gpus]
    tables = [table for table in steps if table is not None]
    spread = results["expert_parallel"]
    if spread:
        weights = ", ".join(
            f"{each['weight_bytes'] / 1e9:.2f} GB on {each['gpus']}" for each in spread
        )
        rows = (row for row in results["steps"] if row["way"] == "EP")
        tables.append(_experts_table(f"ms per step; weights per GPU: {weights}", rows))
    return [*lines, *tables, _layouts_table(results["layouts"]), *_load_tables(results["loads"])]


def _steps_table(gpus: int, results: dict[str, Any]) -> Table | None:
    """Steps of pure TP, SP and shift layouts; mixed layouts are in the JSON."""
    wanted = {"TP": (1, gpus), "SP": (gpus, 1), "shift": (gpus, 1)}
    times: dict[int, dict[tuple[str, str], float]] = {}
    for row in results["steps"]:
        if row["gpus"] == gpus and (row["sp"], row["tp"]) == wanted.get(row["way"]):
            times.setdefault(row["num_tokens"], {})[row["kind"], row["way"]] = row["ms"]
    columns = [
        (kind, way)
        for kind in ("decode", "prefill")
        for way in wanted
        if any((kind, way) in row for row in times.values())
    ]
    if not columns:
        return None
    table = _table(
        f"{gpus} GPUs: ms per step", "tokens", *(f"{kind}\n{way}" for kind, way in columns)
    )
    for size, row in times.items():
        best = {
            kind: min(row[column] for column in columns if column[0] == kind) for kind, _ in columns
        }
        cells = [Text(_ms(row[c]), "bold" if row[c] == best[c[0]] else "") for c in columns]
        table.add_row(f"{size:,}", *cells)
    return table


def _experts_table(title: str, rows: Iterable[dict[str, Any]]) -> Table:
    """Steps of replicas with the experts spread over them, by number of GPUs."""
    times: dict[int, list[float]] = {}
    columns: dict[tuple[str, int], None] = {}
    for row in sorted(rows, key=lambda row: (row["kind"], row["gpus"])):
        columns[row["kind"], row["gpus"]] = None
        times.setdefault(row["num_tokens"], []).append(row["ms"])
    names = (f"{kind}\n{gpus} GPUs" for kind, gpus in columns)
    table = _table(f"Experts over replicas (EP): {title}", "tokens", *names)
    for size, row_times in times.items():
        table.add_row(f"{size:,}", *map(_ms, row_times))
    return table


def _layouts_table(layouts: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "Layouts: weights per GPU, KiB sent per layer and token, best threshold",
        "GPUs",
        "SP x TP",
        "base\nGB",
        "shift\nGB",
        "base\nKiB",
        "shift\nKiB",
        "threshold\ntokens",
        "decode\nonly",
        "prefill\nonly",
    )
    for row in layouts:
        weights, moved = row["weight_bytes"], row["layer_bytes_per_token"]
        no_shift = row["sp"] == 1
        thresholds = [row["threshold"], *row["threshold_of"].values()]
        table.add_row(
            str(row["gpus"]),
            f"{row['sp']} x {row['tp']}",
            f"{weights['base'] / 1e9:.2f}",
            "-" if no_shift else f"{weights['shift'] / 1e9:.2f}",
            f"{moved['base'] / 1024:.1f}",
            "-" if no_shift else f"{moved['shift'] / 1024:.1f}",
            *("-" if no_shift else f"{each:,}" for each in thresholds),
        )
    return table


def _load_tables(loads: Sequence[dict[str, Any]]) -> list[RenderableType]:
    """For each load, all ways to run it, best first."""
    tables: dict[str, Table] = {}
    for load in loads:
        title = (
            f"{load['load']}: {load['num_reqs']} requests of {load['prompt_tokens']} tokens "
            f"that generate {load['output_tokens']}"
        )
        columns = ("GPUs", "way", "SP x TP", "threshold", "seconds", "tokens/s", "of best")
        table = tables.setdefault(load["load"], _table(title, *columns))
        table.add_section()
        best = load["best"]
        for way in sorted(load["ways"], key=lambda way: float(way["seconds"])):
            table.add_row(
                str(way["gpus"]),
                way["way"],
                f"{way['sp']} x {way['tp']}",
                f"{way['threshold']:,}" if way["way"] == "shift" else "-",
                f"{way['seconds']:.3f}",
                f"{way['tokens_per_s']:,.0f}",
                f"{best['seconds'] / way['seconds']:.0%}",
                style="bold" if way == best else None,
            )
    return list(tables.values())


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.2f}"


def _table(title: str, *columns: str) -> Table:
    """A table with names left-aligned and numbers right-aligned."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("load", "way") else "right")
    return table
