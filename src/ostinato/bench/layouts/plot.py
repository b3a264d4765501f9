"""``ostinato plan parallel --plot``: predicted step times of TP, SP and shift, over the tokens.

One panel for decode and one for prefill. Solid lines are steps, and dotted lines of the same color
are their communication; the wide line is a layout with its shift threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.bench.plot import matplotlib_module
from ostinato.errors import ConfigError
from ostinato.parallel.layout import ParallelLayout
from ostinato.paths import writing

_KINDS = {"decode": "decode: one token per request", "prefill": "prefill: one prompt"}


def draw_into(results: dict[str, Any], path: Path, layout: ParallelLayout | None) -> None:
    """Plot the ``results`` for ``layout`` (None: most GPUs, then most SP) to ``path``."""
    figure = draw(results, layout)
    with writing(path):
        figure.savefig(path, dpi=160, bbox_inches="tight")


def draw(results: dict[str, Any], layout: ParallelLayout | None = None) -> Any:
    """A matplotlib figure."""
    about = _layout(results, layout)
    figure = matplotlib_module("matplotlib.figure").Figure(figsize=(10.5, 4.9))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (kind, title) in zip(panels, _KINDS.items(), strict=True):
        _panel(axes, results, about, kind)
        axes.set_title(title, fontsize=10, loc="left")
    panels[0].set_ylabel("time of a step, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=5, loc="upper center",
                  bbox_to_anchor=(0.5, 0.02))  # fmt: skip
    figure.suptitle(_title(results, about), fontsize=11, x=0.07, y=1.0, ha="left")
    figure.subplots_adjust(wspace=0.06, left=0.07, right=0.99, top=0.86)
    return figure


def _layout(results: dict[str, Any], asked: ParallelLayout | None) -> dict[str, Any]:
    layouts: Sequence[dict[str, Any]] = results["layouts"]
    if asked is None:
        return max(layouts, key=lambda row: (row["gpus"], row["sp"]))
    found = [row for row in layouts if (row["sp"], row["tp"]) == (asked.sp, asked.tp)]
    if not found:
        predicted = ", ".join(f"{row['sp']}x{row['tp']}" for row in layouts)
        raise ConfigError(
            f"the layout {asked.sp}x{asked.tp} was not predicted; predicted layouts: {predicted}"
        )
    return found[0]


def _panel(axes: Any, results: dict[str, Any], about: dict[str, Any], kind: str) -> None:
    gpus, sp, tp = about["gpus"], about["sp"], about["tp"]
    base = f"SP {sp}" if tp == 1 else f"SP {sp} x TP {tp}"
    way = "SP" if tp == 1 else "SP+TP"
    if sp > 1:  # first, so that the other lines are drawn on top
        rows = _rows(results, kind, "shift", (sp, tp))
        points = sorted([*_points(rows, "ms"), *_corner(about, kind)])
        axes.plot(*zip(*points, strict=True), label=f"{base} with shift", color="#f2a0ab", lw=7,
                  solid_capstyle="round")  # fmt: skip
    for label, name, shape, color in (
        (f"TP {gpus}", "TP", (1, gpus), "#2f6fb7"),
        (base, way, (sp, tp), "#b3541e"),
    ):
        rows = _rows(results, kind, name, shape)
        if not rows:  # this layout was not predicted
            continue
        axes.plot(*zip(*_points(rows, "ms"), strict=True), label=label, color=color, marker="o",
                  ms=3.5, lw=1.8)  # fmt: skip
        told = _points(rows, "communication_ms")
        axes.plot(*zip(*told, strict=True), label=f"{label}, communication", color=color, ls=":",
                  lw=1.4)  # fmt: skip
    _format(axes, results)
    if about["threshold"] and sp > 1:
        axes.axvline(about["threshold"], color="#888888", lw=1, ls="--", zorder=1)
        # Above the panel, clear of all lines; centred, or flush with the right edge.
        edge = 0.75 * max(row["num_tokens"] for row in results["steps"])
        axes.annotate(f"threshold {about['threshold']:,}", (about["threshold"], 1.0),
                      xycoords=("data", "axes fraction"), xytext=(0, 2), fontsize=8,
                      textcoords="offset points", va="bottom", color="#555555",
                      ha="right" if about["threshold"] > edge else "center")  # fmt: skip


def _rows(
    results: dict[str, Any], kind: str, way: str, shape: tuple[int, int]
) -> list[dict[str, Any]]:
    return [
        row
        for row in results["steps"]
        if (row["kind"], row["way"], (row["sp"], row["tp"])) == (kind, way, shape)
    ]


def _points(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["num_tokens"], row[key]) for row in rows]


def _corner(about: dict[str, Any], kind: str) -> list[tuple[int, float]]:
    """The point where the shift model ends, which may be far from the next size."""
    at = about["ms_at_threshold"]
    return [(about["threshold"], at[kind])] if kind in at else []


def _format(axes: Any, results: dict[str, Any]) -> None:
    ticker = matplotlib_module("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["num_tokens"] for row in results["steps"]})
    axes.set_xticks(sizes, [f"{size}" for size in sizes], fontsize=8)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("tokens in the batch")
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(results: dict[str, Any], about: dict[str, Any]) -> str:
    how = "measured on one GPU" if results["compute"] == "measured" else "by a roofline"
    return (
        f"{results['model']}, {results['dtype']}, {about['gpus']} GPUs: predicted, compute {how},\n"
        f"communication by formula at {results['bandwidth_gb_s']:g} GB/s and "
        f"{results['latency_us']:g} µs"
    )
