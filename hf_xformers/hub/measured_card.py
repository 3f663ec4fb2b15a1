# SPDX-License-Identifier: Apache-2.0
"""A card with what `hf-xformers benchmark` measured, of a variant or of a checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attention_map import attention_maps, draw
from .checkpoint_card import checkpoint_card
from .model_card import _table, caption, variant_card
from .sweep import SWEEP, best_of_sweep

_BEFORE = ("\n## Use\n", "\n## Citation\n", "\n<!-- ")  # sections of a checkpoint's card that follow the measured ones
_SPEED = {
    "label": "entry",
    "shape": "shape",
    "at": "tokens",
    "ms": "ms",
    "time ratio": "time / dense",
    "peak MiB": "peak MiB",
    "memory ratio": "memory / dense",
}
_QUALITY = {
    "at": "task",
    "label": "entry",
    "head": "head",
    "accuracy": "accuracy",
    "chance accuracy": "chance",
    "loss": "loss",
    "steps": "steps",
    "seconds": "seconds",
}
_SWEPT = {"task": "task", "label": "entry", "shape": "shape", **{name: name for name in SWEEP[2:]}}


@dataclass(frozen=True)
class Card:
    """text: Markdown with metadata. picture: the attention map as SVG, to lie at `picture_name` next to the card."""

    text: str
    picture: str
    picture_name: str


def make_card(name: str, results: str | Path | None = None) -> Card:
    """The card of a variant (its name) or of a checkpoint (its folder).

    Raises:
        ValueError: neither a variant nor a checkpoint, a checkpoint of other models, or a file that is no result of
            `hf-xformers benchmark` or has nothing about this variant.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_checkpoint(folder, results)
    from ..variants import config_class, resolve

    if "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no folder; give a checkpoint folder that exists, or a variant")
    model_type = resolve(name)
    sections = [] if results is None else measured_sections(model_type, results)
    text = variant_card(model_type, sections=sections)
    return Card(text, draw(attention_maps(config_class(model_type))), f"maps/{model_type}.svg")


def _of_checkpoint(folder: Path, results: str | Path | None) -> Card:
    from ..training.run_folder import saved_config
    from ..variants import config_class, model_types

    model_type = saved_config(folder).get("model_type")
    if model_type not in model_types():
        raise ValueError(
            f"{str(folder)!r} holds a model of type {model_type!r}, which is none of this package's variants; convert"
            " it with `hf-xformers convert`, or give a variant"
        )
    cls = config_class(model_type)
    sections = [f"![attention map](maps/{model_type}.svg)", caption(cls)]
    sections += [] if results is None else measured_sections(model_type, results)
    text = str(checkpoint_card(folder, folder.resolve().name))
    place = min((text.index(mark) for mark in _BEFORE if mark in text), default=len(text))
    text = text[:place] + "\n" + "\n\n".join(sections) + "\n" + text[place:]
    return Card(text, draw(attention_maps(cls)), f"maps/{model_type}.svg")


def measured_sections(model_type: str, results: str | Path) -> list[str]:
    """The Markdown that shows a variant's rows of `results.json`: tables, and where they were measured.

    Raises:
        ValueError: no such file, no result of `hf-xformers benchmark`, or nothing about this variant in it.
    """
    path = Path(results).expanduser()
    if path.is_dir():
        path = path / "results.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        machine, settings = content["machine"], content["settings"]
        rows = [row for row in content["rows"] if row["variant"] == model_type and row["status"] == "ok"]
        speed = [row for row in rows if row["kind"] == "speed"]
        quality = [row for row in rows if row["kind"] == "quality"]
    except OSError as error:
        raise ValueError(f"--results {str(results)!r} cannot be read: {error.strerror}; give a results.json") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"--results {str(results)!r} is no result of `hf-xformers benchmark`; give its results.json"
        ) from None
    if not speed and not quality:
        raise ValueError(
            f"--results {str(results)!r} has no figures of {model_type!r}; measure it with `hf-xformers benchmark"
            f" --variants {model_type.removeprefix('xf_')} ...`"
        )
    what = "one attention layer" if settings["level"] == "layer" else f"whole models of size {settings['size']}"
    parts = ["## Compared with dense attention", _place(machine, settings)]
    if speed:
        parts += [
            (
                f"Forward and backward of {what}, batch {settings['batch_size']}; ratios below 1 are faster or smaller"
                " than dense."
            ),
            _renamed(speed, _SPEED),
        ]
    if quality:
        training = settings["training"]
        swept, single = [row for row in quality if "point" in row], [row for row in quality if "point" not in row]
        widths = sorted({row.get("point", training)["hidden_size"] for row in quality})
        parts += [
            (
                f"Models of {training['layers']} layers, {'/'.join(map(str, widths))} wide, on rows of"
                f" {training['length']} tokens. `dense (X)` is X with dense attention, everything else as it is."
            )
        ]
        if single:
            parts.append(_renamed(single, _QUALITY))
        if swept:
            parts += [
                (
                    "At each width the learning rate with the highest mean accuracy over seeds (`runs`), and their"
                    " lowest and highest. `state size`: numbers that generation keeps of one row."
                ),
                _renamed(best_of_sweep(swept), _SWEPT),
            ]
    return parts


def _renamed(rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    return _table([{shown: row[key] for key, shown in names.items() if row.get(key) is not None} for row in rows])


def _place(machine: dict[str, Any], settings: dict[str, Any]) -> str:
    return (
        f"Measured by `hf-xformers benchmark` on {machine['device']}, {machine['threads']} thread(s),"
        f" {settings['dtype']}, torch {machine['torch']}."
    )
