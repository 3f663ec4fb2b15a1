"""Charts as SVG, in a light and a dark form, the same bytes at every build."""

from __future__ import annotations

import io
import re
from typing import Any

from .charts import Chart

INK, GRID = "#24292f", "#d0d4d9"
DARK = {INK: "#e2e4e9", GRID: "#4a5160"}
# Told apart by eyes that see few colors, on light and on dark grounds alike (after Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a4d9", "#8f5fbf", "#7f7f7f", "#a0522d")
MARKS = "os^Dv<>PX"
WIDTH = 4.4  # inches; narrow, so that a phone shows its letters in a legible size


def drawn(charts: list[Chart]) -> dict[str, str]:
    """Path below the folder of results -> SVG text, of the charts in both forms."""
    made = {}
    for chart in charts:
        light = _svg(chart)
        dark = light
        for color, instead in DARK.items():
            dark = dark.replace(color, instead)
        made |= {f"plots/{chart.name}.light.svg": light, f"plots/{chart.name}.dark.svg": dark}
    return made


def _svg(chart: Chart) -> str:
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = _lines(chart) if chart.kind == "lines" else _dots(chart)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # The declaration of the document's type names another host, and browsers need none.
    text = re.sub(r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.S)
    return text


def _figure(height: float, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, fontsize=12, x=0.02, ha="left")
    axes.grid(True)
    axes.set_axisbelow(True)
    return figure, axes


def _lines(chart: Chart) -> Any:
    labels = list(chart.points)
    figure, axes = _figure(3.1 + 0.22 * len(labels), chart.title)
    for index, label in enumerate(labels):
        xs, ys = zip(*chart.points[label])
        axes.plot(xs, ys, color=COLORS[index % 9], marker=MARKS[index % 9], markersize=4, linewidth=1.6, label=label)
    lengths = sorted({x for points in chart.points.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    if chart.log:
        _log(axes, "y", chart.even, [y for points in chart.points.values() for _, y in points])
    if chart.even:
        axes.axhline(1, color=INK, linewidth=1, linestyle="--", label=chart.even)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    figure.legend(loc="outside lower left", fontsize=10, frameon=False)
    return figure


def _dots(chart: Chart) -> Any:
    labels = list(chart.points)[::-1]  # the first one on top
    figure, axes = _figure(1.8 + 0.25 * len(labels), chart.title)
    values = list(dict.fromkeys(name for points in chart.points.values() for name, _ in points))
    for index, value in enumerate(values):
        found = [(x, row) for row, label in enumerate(labels) for name, x in chart.points[label] if name == value]
        xs, rows = zip(*found)
        axes.plot(xs, rows, MARKS[index], color=COLORS[index], markersize=5, label=value, alpha=0.9)
    if chart.log:
        _log(axes, "x", chart.even, [x for points in chart.points.values() for _, x in points])
    if chart.even:
        axes.axvline(1, color=INK, linewidth=1, linestyle="--", label=chart.even)
    axes.set_yticks(range(len(labels)), [label.strip() for label in labels], fontsize=10)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_xlabel(chart.x, loc="right")  # to the left of the plot there is room for it
    if len(values) > 1 or chart.even:
        figure.legend(loc="outside lower left", fontsize=10, frameon=False, ncols=2)
    return figure


def _log(axes: Any, which: str, even: str, values: list[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers, close enough that there are several."""
    values = [*values, 1.0] if even else values  # the line at 1 is drawn, too
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    ticks = [step * 10**power for power in range(-4, 10) for step in steps]
    ticks = [tick for tick in ticks if low / 1.6 <= tick <= high * 1.6]
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.minorticks_off()
