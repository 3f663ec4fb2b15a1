"""Pictures of a comparison, with matplotlib (an extra: `pip install hf_xformers[plots]`): PNG and SVG of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HINT = "install matplotlib (pip install 'hf_xformers[plots]') and run the command again with --resume for the plots"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_all(folder: Path, speed: Sequence[dict], quality: Sequence[dict], maps: Sequence[dict]) -> list[str]:
    """Draws what there is and returns the names of the PNG files; each has an SVG beside it."""
    written = []
    for name, column, unit in (("time", "ms", "ms per step"), ("memory", "peak MiB", "peak memory of a step, MiB")):
        rows = [row for row in speed if row["status"] == "ok" and row.get(column) is not None]
        if rows:
            written += _save(against_length(rows, column, unit), folder, name)
    good = [row for row in quality if row["status"] == "ok"]
    if good:
        written += _save(loss_against_time(good), folder, "loss")
    drawn = [row for row in maps if row["status"] == "ok"]
    if drawn:
        written += _save(map_sheet(drawn), folder, "attention_maps")
    return written


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    return Figure(figsize=(width, height), layout="constrained")


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


def against_length(rows: Sequence[dict], column: str, unit: str) -> Any:
    """A line per label over the number of tokens, both axes logarithmic; dense attention dashed."""
    figure = _figure(6, 4)
    axes = figure.add_subplot()
    for label, group in _grouped(rows).items():
        group = sorted(group, key=lambda row: row["at"])
        style = {"linestyle": "--", "color": "black"} if group[0]["label"] == "dense" else {}
        axes.plot([row["at"] for row in group], [row[column] for row in group], marker="o", label=label, **style)
    axes.set_xscale("log", base=2)
    if all(row[column] > 0 for row in rows):
        axes.set_yscale("log")
    ticks = sorted({row["at"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens per row")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def loss_against_time(rows: Sequence[dict]) -> Any:
    """A panel per task: held-out loss over seconds of training, with the chance level dotted."""
    tasks = list(dict.fromkeys(row["at"] for row in rows))
    figure = _figure(4 * len(tasks) + 1, 3.6)
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), index + 1)
        group = [row for row in rows if row["at"] == task]
        for label, found in _grouped(group).items():
            style = {"linestyle": "--", "color": "black"} if found[0]["label"] == "dense" else {}
            curve = found[0]["curve"]
            axes.plot([point[1] for point in curve], [point[2] for point in curve], label=label, **style)
        axes.axhline(group[0]["chance loss"], linestyle=":", color="grey")
        axes.set_title(task)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("held-out loss, nats per answer" if index == 0 else "")
        axes.grid(alpha=0.3)
    axes.legend()
    return figure


def map_sheet(rows: Sequence[dict]) -> Any:
    """All attention maps, one panel each."""
    panels = [
        (f"{label}\n{name}", weights)
        for label, group in _grouped(rows).items()
        for name, weights in group[0]["maps"].items()
    ]
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = _figure(2.4 * columns, 3.0 * lines)
    for index, (title, weights) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.imshow([[value or float("nan") for value in line] for line in weights], cmap="viridis")
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure
