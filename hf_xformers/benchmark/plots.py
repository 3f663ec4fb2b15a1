# SPDX-License-Identifier: Apache-2.0
"""Pictures of a comparison, with matplotlib (an extra: `pip install hf_xformers[plots]`): PNG and SVG of each."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..hub.sweep import best_of_sweep

HINT = "install matplotlib (pip install 'hf_xformers[plots]') and run the command again with --resume for the plots"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_all(
    folder: Path,
    speed: Sequence[dict],
    quality: Sequence[dict],
    maps: Sequence[dict],
    measured: str = "",
    trained: str = "",
) -> list[str]:
    """Draws what there is and returns the names of the PNG files; each has an SVG next to it.

    measured, trained: what speed and quality were measured on, for the titles (sizes, dtype).
    """
    written = []
    for name, column, what in (("time", "ms", "Time of a step"), ("memory", "peak MiB", "Peak memory of a step")):
        rows = [row for row in speed if row["status"] == "ok" and row.get(column) is not None]
        if rows:
            written += _save(against_length(rows, column, _title(what, measured, rows)), folder, name)
    good = [row for row in quality if row["status"] == "ok"]
    points = [row for row in good if "point" in row]
    swept = [row for row in best_of_sweep(points) if row["state size"] is not None]  # None: it reads both sides
    if swept:
        title = _title("Accuracy against state size", trained, swept)
        written += _save(against_state(swept, title), folder, "state")
    elif good and not points:
        written += _save(loss_curves(good, _title("Held-out loss", trained, good)), folder, "loss")
    drawn = [row for row in maps if row["status"] == "ok"]
    if drawn:
        title = _title("Attention weights", "untrained, mean over heads, float64", drawn)
        written += _save(map_sheet(drawn, title), folder, "attention_maps")
    return written


def _title(what: str, about: str, rows: Iterable[dict]) -> str:
    """Two lines: what is shown, and of what; the shape is named where it is one for all."""
    shapes = {row["shape"] for row in rows}
    return "\n".join(filter(None, (what, ", ".join(filter(None, (*shapes, about) if len(shapes) == 1 else (about,))))))


def _figure(width: float, height: float, title: str) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=(width, height), layout="constrained")
    head, _, about = title.partition("\n")
    room = max(int(width * 13), 30)
    figure.suptitle("\n".join([head, *textwrap.wrap(about, room)]), fontsize=10)
    return figure


def _save(figure: Any, folder: Path, name: str) -> list[str]:
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{name}.{suffix}", dpi=150)
    return [f"{name}.png"]


def _grouped(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Rows by what the legend calls them; the shape is named where a label has several."""
    rows = list(rows)
    shapes: dict[str, set[str]] = {}
    for row in rows:
        shapes.setdefault(row["label"], set()).add(row["shape"])
    groups: dict[str, list[dict]] = {}
    for row in rows:
        several = len(shapes[row["label"]]) > 1
        groups.setdefault(f"{row['label']} ({row['shape']})" if several else row["label"], []).append(row)
    return groups


def _legend(figure: Any, axes: Any) -> None:
    """Below the panels, where it covers nothing, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    widest = max(len(label) for label in labels) * 0.062 + 0.5  # inches
    columns = min(max(int(figure.get_figwidth() / widest), 1), len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def mebibytes(value: float) -> str:
    """An amount in MiB as people read it: 0.5 MiB, 64 MiB, 1.5 GiB."""
    return f"{value / 1024:g} GiB" if value >= 1024 else f"{value:g} MiB"


def milliseconds(value: float) -> str:
    """A time in ms as people read it: 0.5 ms, 20 ms, 2 s."""
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def log_ticks(low: float, high: float, steps: Sequence[float], base: float, most: int = 8) -> list[float]:
    """Round values that span [low, high] (both above 0), at most `most` + 1 of them: powers of `base` times `steps`,
    thinned to the powers, then to every second one, and so on, until they are few enough."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    candidates = [[base**power * step for power in range(first, last + 1) for step in steps]]
    candidates += [
        [base**power for power in range(first, last + stride, stride)] for stride in range(1, last - first + 2)
    ]
    for ticks in candidates:
        below, above = [t for t in ticks if t <= low][-1:], [t for t in ticks if t >= high][:1]
        inside = [*below, *(t for t in ticks if low < t < high), *above]
        if len(inside) <= most + 1:
            break
    return inside


def against_length(rows: Sequence[dict], column: str, title: str = "") -> Any:
    """A line per label over the number of tokens, both axes logarithmic; dense attention dashed. column: `ms` or
    `peak MiB`."""
    figure = _figure(6, 4.4, title)
    axes = figure.add_subplot()
    for label, group in _grouped(rows).items():
        group = sorted(group, key=lambda row: row["at"])
        style = {"linestyle": "--", "color": "black"} if group[0]["label"] == "dense" else {}
        axes.plot([row["at"] for row in group], [row[column] for row in group], marker="o", label=label, **style)
    axes.set_xscale("log", base=2)
    values = [row[column] for row in rows]
    written, steps, base = (mebibytes, (1.0,), 2.0) if column == "peak MiB" else (milliseconds, (1.0, 2.0, 5.0), 10.0)
    if min(values) > 0:
        axes.set_yscale("log", base=base)
        heights = log_ticks(min(values), max(values), steps, base)
        axes.set_yticks(heights, [written(value) for value in heights])
        axes.set_ylim(heights[0] / 1.1, heights[-1] * 1.1)
    else:
        axes.yaxis.set_major_formatter(lambda value, _: written(value))
    ticks = sorted({row["at"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens per row")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def loss_curves(rows: Sequence[dict], title: str = "") -> Any:
    """A column of panels per task: held-out loss over seconds and over steps of training; what guessing by frequency
    reaches is dotted."""
    tasks = list(dict.fromkeys(row["at"] for row in rows))
    figure = _figure(3.6 * len(tasks) + 1, 6, title)
    for index, task in enumerate(tasks):
        group = [row for row in rows if row["at"] == task]
        twins = [label for label in _grouped(group) if label.startswith("dense")]
        for line, (column, unit) in enumerate(((1, "seconds of training"), (0, "steps of training"))):
            axes = figure.add_subplot(2, len(tasks), line * len(tasks) + index + 1)
            for label, found in _grouped(group).items():
                dense = label.startswith("dense")
                style: dict[str, Any] = (
                    {"linestyle": "--", "color": "black" if len(twins) == 1 else None} if dense else {}
                )
                curve = found[0]["curve"]
                axes.plot([point[column] for point in curve], [point[2] for point in curve], label=label, **style)
            axes.axhline(group[0]["chance loss"], linestyle=":", color="grey", label="chance (answers' frequencies)")
            axes.set_title(task if line == 0 else "", fontsize=10)
            axes.set_xlabel(unit)
            axes.set_ylabel("nats per answer" if index == 0 else "")
            axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def against_state(rows: Sequence[dict], title: str = "") -> Any:
    """A panel per task: mean accuracy over the numbers that generation keeps of a row, a line per label with a point
    per width, lowest and highest seed as its bar; dense attention is dashed, guessing dotted. rows: those of
    [`best_of_sweep`][hf_xformers.hub.sweep.best_of_sweep] that have a state."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = _figure(4.2 * len(tasks) + 1, 4.4, title)
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), index + 1)
        group = [row for row in rows if row["task"] == task]
        for label, found in _grouped(group).items():
            found = sorted(found, key=lambda row: row["state size"])
            middle = [row["accuracy"] for row in found]
            bars = [
                [row["accuracy"] - row["lowest"] for row in found],
                [row["highest"] - row["accuracy"] for row in found],
            ]
            style = {"linestyle": "--", "color": "black"} if label.startswith("dense") else {}
            sizes = [row["state size"] for row in found]
            axes.errorbar(sizes, middle, yerr=bars, marker="o", capsize=2, label=label, **style)
        axes.axhline(group[0]["chance accuracy"], linestyle=":", color="grey", label="guessing")
        axes.set_xscale("log" if all(row["state size"] for row in group) else "symlog", base=2)  # a log has no 0
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("numbers in the state of a row")
        axes.set_ylabel("accuracy" if index == 0 else "")
        axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def map_sheet(rows: Sequence[dict], title: str = "") -> Any:
    """All attention maps, one panel each with its own colors; pairs without weight stay white."""
    panels = [
        (f"{label}\n{name}", weights)
        for label, group in _grouped(rows).items()
        for name, weights in group[0]["maps"].items()
    ]
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = _figure(max(2.7 * columns, 4.0), 2.7 * lines + 0.5, title)
    for index, (name, weights) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        height, width = len(weights), len(weights[0])
        image = axes.imshow([[value or float("nan") for value in line] for line in weights], cmap="viridis", vmin=0)
        axes.set_title(f"{name}, {height} x {width}", fontsize=8)
        axes.set_xticks([0, width // 2, width - 1])
        axes.set_yticks([0, height // 2, height - 1])
        axes.tick_params(labelsize=7)
        axes.set_xlabel("key", fontsize=8)
        axes.set_ylabel("query", fontsize=8)
        figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04).ax.tick_params(labelsize=7)
    return figure
