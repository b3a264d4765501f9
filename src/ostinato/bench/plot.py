"""``ostinato bench plot``: plots a result file of ``bench decode``, ``throughput`` or ``serve``.

Plotting is separate from measuring because it needs matplotlib, which is optional and may be
missing on the machine that measures.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError
from ostinato.paths import check_writable, writing

_SUFFIXES = (".png", ".svg", ".pdf")
# What a value that is missing, or of another type, leads to.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# By name, so that a subject looks the same in every plot.
_STYLES = {
    "ostinato": ("Ostinato", "#c8102e", "o"),
    "eager": ("Ostinato without graphs", "#e08a3c", "s"),
    "hf-compile": ("transformers, compiled", "#2f6fb7", "D"),
    "hf": ("transformers", "#7d8794", "^"),
}


def draw_file(result: Path, out: Path) -> None:
    """Plot the result file of ``ostinato bench decode``, ``throughput`` or ``serve``."""
    check_plot_file(out)
    try:
        results = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a result from {str(result)!r}: {error}") from error
    try:
        figure = _draw_any(results)
        if figure is None:
            raise ConfigError(
                f"{str(result)!r} is not a result of `ostinato bench decode`, `throughput` or "
                "`serve`"
            )
        with writing(out):
            figure.savefig(out, dpi=160, bbox_inches="tight")
    except ConfigError:
        raise
    except _DAMAGED as error:
        raise ConfigError(
            f"{str(result)!r} is a damaged result: {type(error).__name__}: {error}; measure again"
        ) from error


def _draw_any(results: Any) -> Any:
    rows = results.get("rows") if isinstance(results, dict) else None
    if rows and all("output_tokens_per_s" in row for row in rows):
        return draw_throughput(results)
    if rows and all("tpot_ms" in row for row in rows):
        return draw(results)
    return None


def draw(results: dict[str, Any]) -> Any:
    """A matplotlib figure of ``results``: one line per subject, and the floor."""
    figure = matplotlib_module("matplotlib.figure").Figure(figsize=(8, 5.2))
    axes = figure.add_subplot()
    rows = sorted(results["rows"], key=lambda row: int(row["batch"]))
    for name in _subjects(rows):
        label, color, marker = _STYLES.get(name, (name, None, "v"))
        points = [(row["batch"], row["tpot_ms"][name]) for row in rows if name in row["tpot_ms"]]
        width = 2.4 if name == "ostinato" else 1.6
        axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker, lw=width)
    floor = [(row["batch"], row["floor_ms"]) for row in rows if row.get("floor_ms") is not None]
    if floor:
        rate = results["bandwidth"]["bytes_per_s"] / 1e12
        label = f"floor: weights and KV at {rate:.2f} TB/s"
        axes.plot(*zip(*floor, strict=True), label=label, color="#222222", ls="--", lw=1.4)
    _format_axes(axes, [row["batch"] for row in rows])
    if floor:
        bottom = axes.get_ylim()[0] / 1.15  # leave room below the floor
        axes.set_ylim(bottom=bottom)
        axes.fill_between(*zip(*floor, strict=True), bottom, color="#222222", alpha=0.08, lw=0)
    axes.set_title(_title(results), fontsize=11, loc="left")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


def draw_throughput(results: dict[str, Any]) -> Any:
    """A matplotlib figure of ``results``: two bars per mix or server, output and all tokens."""
    rows = results["rows"]
    figure = matplotlib_module("matplotlib.figure").Figure(figsize=(8, 1.2 + 0.8 * len(rows)))
    axes = figure.add_subplot()
    for offset, key, label, color in (
        (-0.2, "output_tokens_per_s", "output tokens/s", "#c8102e"),
        (0.2, "tokens_per_s", "prompt and output tokens/s", "#7d8794"),
    ):
        places = [place + offset for place in range(len(rows))]
        bars = axes.barh(places, [row[key] for row in rows], height=0.36, color=color, label=label)
        axes.bar_label(bars, [f"{row[key]:,.0f}" for row in rows], padding=3)
    axes.set_yticks(range(len(rows)), [row.get("server") or row["mix"] for row in rows])
    axes.invert_yaxis()  # the first on top
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(_title(results), fontsize=11, loc="left")
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.02))
    return figure


def check_plot_file(path: Path) -> None:
    """Raise early if a plot cannot be written to ``path``."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"a plot must be one of {', '.join(_SUFFIXES)}, got {path.name!r}")
    check_writable(path)


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib, which is optional."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"plotting needs matplotlib, which cannot be imported ({error}); install it with "
            "`pip install matplotlib`"
        ) from error


def _subjects(rows: list[dict[str, Any]]) -> list[str]:
    """All subjects of any row, slowest first, as the lines appear."""
    slowest: dict[str, float] = {}
    for row in rows:
        for name, milliseconds in row["tpot_ms"].items():
            slowest.setdefault(name, milliseconds)
    return sorted(slowest, key=lambda name: -slowest[name])


def _format_axes(axes: Any, batches: list[int]) -> None:
    ticker = matplotlib_module("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    # The axis may span just one decade, so label more than its ends, as plain numbers.
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("batch size")
    axes.set_ylabel("time per output token, ms")
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(results: dict[str, Any]) -> str:
    machine = results["machine"]
    weights = ", random weights" if results["random_weights"] else ""
    return (
        f"{results['model']}, {results['dtype']}{weights}\n"
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"
    )
