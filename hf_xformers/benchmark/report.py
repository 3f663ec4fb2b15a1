# SPDX-License-Identifier: Apache-2.0
"""What a comparison writes for people: `results.md`, the attention maps as SVG, and the plots."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from ..core.saved_files import write_text
from ..hub.attention_map import draw
from ..hub.sweep import SWEEP, best_of_sweep
from .measure import QUIET
from .plots import HINT, can_plot, plot_all
from .runner import Comparison
from .steps import HEADS, WIDTH
from .tables import about, folded
from .tasks import TASKS

# Columns in order; those beyond the seventh are folded away.
SPEED = ("label", "tokens", "ms", "time ratio", "peak MiB", "memory ratio", "status", "variant", "shape")
QUALITY = (
    *("task", "label", "accuracy", "chance accuracy", "loss", "chance loss", "status"),
    *("variant", "shape", "head", "steps", "seconds", "parameters"),
)


def write_report(comparison: Comparison) -> list[str]:
    """Writes everything besides `results.json`; returns the names of the files."""
    folder, settings = comparison.folder, comparison.settings
    speed, quality, maps = (comparison.rows(kind) for kind in ("speed", "quality", "map"))
    written = write_maps(folder, maps)
    training = settings.training
    measured = f"{_what(settings)}, batch {settings.batch_size}, {settings.dtype}"
    widths = "/".join(str(width) for width in settings.sweep.get("hidden_size", [training.hidden_size]))
    models = f"{training.layers} layers, {widths} wide, {training.heads} heads"
    trained = f"{models}, rows of {training.length} tokens"
    titles = {"measured": measured, "trained": f"{trained}, float32"}
    pictures = plot_all(folder, speed, quality, maps, **titles) if can_plot() else []
    parts = ["# Comparison", about(comparison.machine, settings.dtype)]
    parts += ["\n".join(f"- `{entry.label}`: {entry}" for entry in comparison.entries)]
    if speed:
        rows = folded(list(map(_told, speed)), SPEED)
        parts += [f"## Time and memory: {_what(settings)}", _speed_note(settings), rows]
        parts += disturbed(speed)
    if quality:
        tasks = [f"- `{name}`: {TASKS[name].about}." for name in settings.tasks]
        parts += [
            "## Quality",
            (
                f"Models of {models}, trained from the same seed on the same rows of {training.length} tokens,"
                f" {training.batch_size} a step, and scored on {training.held_out} held-out rows. `accuracy` and"
                " `loss` (nats) are per answer; chance is the most frequent answer of the training rows. `seconds` are"
                " those of training alone."
            ),
            _beside(quality),
            "\n".join(tasks),
        ]
        if settings.sweep:
            swept = settings.sweep
            rates, seeds = (", ".join(f"{one:g}" for one in swept[name]) for name in ("learning_rate", "seed"))
            parts += [
                f"Each entry was trained at each width with learning rates {rates} and seeds {seeds}; a row has the"
                " rate with the highest mean accuracy over seeds, and their lowest and highest (`runs`: how many)."
                " `state size`: numbers that generation keeps of one row.",
                folded(best_of_sweep(quality), SWEEP),
            ]
        else:
            parts.append(folded(list(map(_told, quality)), QUALITY))
    failed = [row for row in (*speed, *quality, *maps) if row["status"] != "ok"]
    if failed:
        lines = [
            f"- {row['label']} ({row['shape']}), {row['kind']} {row['at'] or ''}: {row['status']}. {row['error']}"
            for row in failed
        ]
        parts += ["## Not measured", "\n".join(lines)]
    shown = [f"![{Path(name).stem}]({name})" for name in pictures or written]
    if shown:
        parts += ["## Pictures", "\n\n".join(shown)]
        if maps:
            parts.append(
                "Attention maps: weights of untrained models on 16 tokens, averaged over heads (query down, key"
                " right), with windows and blocks small enough for that; white: no weight."
            )
    if not can_plot():
        parts.append(f"No plots: {HINT}.")
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")
    pictures += [name.replace(".png", ".svg") for name in pictures]
    return ["results.json", "results.md", *pictures, *written]


def _beside(quality: Iterable[dict[str, Any]]) -> str:
    """What dense attention is, in rows of quality."""
    text = "`dense (X)` is X with dense attention and everything else as it is: what differs is due to the attention."
    others = {row["variant"] for row in quality if row["label"] == "dense"}
    if others:
        text += (
            f" `dense` is {' or '.join(sorted(others))}, next to entries whose other parts refuse dense attention:"
            " what differs is due to the whole recipe."
        )
    return text


def disturbed(speed: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence where other programs ran during a measurement."""
    most = max((row.get("others busy", 0.0) for row in speed), default=0.0)
    if most <= QUIET * (psutil.cpu_count() or 1):
        return []
    return [
        f"While some of this was measured, other programs kept up to {most:.1f} processors busy: ratios of what goes"
        " through memory come out too high then. Measure again (`--overwrite_output_dir`) when the machine is quiet."
    ]


def write_maps(folder: Path, rows: Iterable[dict[str, Any]]) -> list[str]:
    """`maps/<label>.svg` for every drawn mechanism; the shape is in the name where a label has several."""
    rows = [row for row in rows if row["status"] == "ok"]
    written = []
    for row in rows:
        several = len({other["shape"] for other in rows if other["label"] == row["label"]}) > 1
        name = re.sub(r"[^\w.-]", "_", row["label"]) + (f"_{row['shape']}" if several else "")
        maps = {title: torch.tensor(weights) for title, weights in row["maps"].items()}
        write_text(folder / "maps" / f"{name}.svg", draw(maps))
        written.append(f"maps/{name}.svg")
    return written


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the names of the table."""
    return {**row, "tokens": row["at"], "task": row["at"]}


def _what(settings: Any) -> str:
    if settings.level == "layer":
        return f"one attention layer ({WIDTH} wide, {HEADS} heads)"
    return f"whole models of size {settings.size}"


def _speed_note(settings: Any) -> str:
    clock = "wall seconds"
    if settings.device == "cuda":
        clock = "seconds between events on the device"
    elif settings.threads == 1:
        clock = "processor seconds"
    return (
        f"Forward and backward, batch {settings.batch_size}. `ms`: median of {settings.rounds} rounds ({clock}), each"
        " entry in turn with dense attention (scaled_dot_product_attention) of the same shape in the same process;"
        " `time ratio`: median of the ratios in each round, below 1 is faster than dense. `peak MiB`: growth of the"
        " peak memory over one step in a process of its own."
    )
