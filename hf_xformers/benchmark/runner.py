# SPDX-License-Identifier: Apache-2.0
"""A comparison: its cells one after the other, each in fresh processes, stored after every one so that it can be
resumed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .children import in_fresh_process
from .entries import Entry, baseline, choose_shapes, dense_twin
from .quality import Training
from .tables import write_json
from .tasks import TASKS, write_task

RESULTS = "results.json"
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What decides the figures of a comparison.

    Args:
        lengths: tokens per row; none: no time and memory.
        level: layer or model (of `size`).
        rounds: timed, after one that is not.
        max_memory: MiB that a process may take beyond its start.
        timeout: seconds of a process.
        tasks: what to train on, as `training` says; none: no training.
        sweep: values of fields of `training`, of which all combinations are trained.
        maps: attention maps as well.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    level: str = "layer"
    size: str = "tiny"
    batch_size: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    rounds: int = 3
    shape: str | None = None
    max_memory: float | None = None
    timeout: float | None = 600.0
    tasks: tuple[str, ...] = ()
    training: Training = field(default_factory=Training)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    maps: bool = True

    def same_figures(self) -> dict[str, Any]:
        """The settings that cells must share to stand in one table."""
        free = ("lengths", "tasks", "maps", "shape", "max_memory", "timeout", "sweep")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}

    def points(self) -> list[dict[str, Any]]:
        """The combinations of the sweep's values; one without any if there is none."""
        return [dict(zip(self.sweep, values)) for values in itertools.product(*self.sweep.values())]


@dataclass(frozen=True)
class Cell:
    """kind: speed, quality or map. at: the length, or the task. point: values of fields of `Training`, in a sweep."""

    kind: str
    entry: Entry
    shape: str
    at: Any = None
    point: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.entry.label, self.shape, self.at, dict(self.point))

    def __str__(self) -> str:
        at = "attention map" if self.kind == "map" else f"{self.at} tokens" if self.kind == "speed" else self.at
        point = [f"{name.replace('_', ' ')} {value:g}" for name, value in self.point.items()]
        return f"{self.entry.label} ({self.shape}): {', '.join([at, *point])}"


class Comparison:
    """Entries under settings, with results in a folder.

    resume: keep the finished cells that the folder has; else it must have none, but for overwrite.

    Raises:
        ValueError: labels that occur twice, a shape that an entry cannot have, results of other settings or of another
            machine in the folder.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        settings: Settings,
        folder: str | Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ):
        from .measure import machine

        labels = [entry.label for entry in entries]
        twice = [label for label in labels if labels.count(label) > 1 or label == "dense"]
        if twice:
            raise ValueError(
                f"the label {twice[0]!r} stands for two entries ({'dense' if twice[0] == 'dense' else 'of yours'});"
                " give each its own, as in `narrow=longformer,wide=longformer`"
            )
        self.entries, self.settings, self.folder = list(entries), settings, Path(folder).expanduser()
        self.shapes = choose_shapes(self.entries, settings.shape)
        self.machine = {**machine(settings.device), "threads": settings.threads}
        self._twins: dict[tuple[str, str], Entry] = {}
        self.results = self._start(resume, overwrite)

    # ------------------------------------------------------------------------------------------------ what to do

    def cells(self) -> list[Cell]:
        """All cells: dense attention before what is compared with it. In quality that is the entry itself with dense
        attention, since positions, norms and heads decide as much."""
        found: list[Cell] = []
        kinds: list[tuple[str, Any]] = [("speed", at) for at in sorted(self.settings.lengths)]
        kinds += [("quality", at) for at in self.settings.tasks]
        for kind, at in [*kinds, *([("map", None)] if self.settings.maps else [])]:
            shapes = self.shapes
            if kind == "quality":
                shapes = choose_shapes(self.entries, self.settings.shape, TASKS[at].order)
                pairs = self._beside_twins(shapes)
                points = self.settings.points()
                found += [Cell(kind, entry, shape, at, point) for entry, shape in pairs for point in points]
                continue
            dense = [(baseline(shape), shape) for shape in dict.fromkeys(shapes.values())]
            others = [(entry, shapes[entry.label]) for entry in self.entries]
            found += [Cell(kind, entry, shape, at) for entry, shape in [*dense, *others]]
        return found

    def _beside_twins(self, shapes: Mapping[str, str]) -> list[tuple[Entry, str]]:
        """The entries, each new recipe after the same one with dense attention."""
        found: list[tuple[Entry, str]] = []
        twins: list[tuple[dict[str, Any], str]] = []
        for entry in self.entries:
            shape = shapes[entry.label]
            if (entry.label, shape) not in self._twins:
                self._twins[entry.label, shape] = dense_twin(entry, shape, self.settings.training.length)
            twin = self._twins[entry.label, shape]
            if twin is not entry and (_recipe(twin), shape) not in twins:
                twins.append((_recipe(twin), shape))
                found.append((twin, shape))
            found.append((entry, shape))
        return found

    def missing(self) -> list[Cell]:
        """The cells without a good result."""
        return [cell for cell in self.cells() if (self.result(cell) or {}).get("status") != "ok"]

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """The stored row of a cell."""
        return next((row for row in self.results["rows"] if _key(row) == cell.key), None)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Stored rows of a kind in the order of the cells."""
        found = [self.result(cell) for cell in self.cells() if cell.kind == kind]
        return [row for row in found if row is not None]

    # ------------------------------------------------------------------------------------------------ doing it

    def run(self, before: Callable[[Cell], None] = lambda cell: None) -> Iterator[dict[str, Any]]:
        """Measures what is missing and yields each row as it is stored. before: called with each cell in advance."""
        with tempfile.TemporaryDirectory(prefix="hf_xformers-") as scratch:
            for cell in self.missing():
                before(cell)
                measure = {"speed": self._speed, "quality": self._quality, "map": self._map}[cell.kind]
                row = {
                    "kind": cell.kind,
                    "label": cell.entry.label,
                    "variant": cell.entry.variant,
                    "shape": cell.shape,
                    "at": cell.at,
                    **({"point": dict(cell.point)} if cell.point else {}),
                    **measure(cell, Path(scratch)),
                }
                self.results["rows"] = [old for old in self.results["rows"] if _key(old) != cell.key] + [row]
                write_json(self.folder / RESULTS, self.results)
                yield row

    def _job(self, cell: Cell, kind: str, **more: Any) -> dict[str, Any]:
        settings = self.settings
        names = ("level", "size", "batch_size", "dtype", "device", "threads", "rounds", "max_memory")
        job = {name: getattr(settings, name) for name in names}
        job |= {"kind": kind, "entry": cell.entry.to_dict(), "shape": cell.shape, **more}
        return in_fresh_process(job, settings.timeout)

    def _speed(self, cell: Cell, scratch: Path) -> dict[str, Any]:
        dense = self.result(Cell("speed", baseline(cell.shape), cell.shape, cell.at))
        comparable = cell.entry.label != "dense" and dense is not None and dense["status"] == "ok"
        beside = {"baseline": baseline(cell.shape).to_dict()} if comparable else {}
        memory = self._job(cell, "memory", length=cell.at)
        if memory["status"] != "ok":
            return memory
        time = self._job(cell, "time", length=cell.at, **beside)
        if time["status"] != "ok":
            return time
        taken, peak = time["value"], memory["value"]
        row: dict[str, Any] = {"status": "ok", "ms": 1000 * taken["seconds"]}
        row["ms range"] = [1000 * seconds for seconds in taken["spread"]]
        row["others busy"] = taken["others busy"]
        row["time ratio"] = 1.0 if cell.entry.label == "dense" else taken["ratio"]
        row["peak MiB"] = None if peak is None else peak / MIB
        known = peak is not None and dense is not None and dense.get("peak MiB")
        row["memory ratio"] = 1.0 if cell.entry.label == "dense" else row["peak MiB"] / known if known else None
        return row

    def _quality(self, cell: Cell, scratch: Path) -> dict[str, Any]:
        training = dataclasses.replace(self.settings.training, **cell.point)
        path = scratch / f"{cell.at}-{training.seed}.npz"
        if not path.exists():
            write_task(
                cell.at, training.length, training.steps * training.batch_size, training.held_out, training.seed, path
            )
        done = self._job(cell, "train", task=cell.at, training=dataclasses.asdict(training), data=str(path))
        return {"status": "ok", **done["value"]} if done["status"] == "ok" else done

    def _map(self, cell: Cell, scratch: Path) -> dict[str, Any]:
        done = self._job(cell, "map")
        if done["status"] == "ok" and not done["value"]:
            return {"status": "failed", "error": "this mechanism has no attention weights"}
        return {"status": "ok", "maps": done["value"]} if done["status"] == "ok" else done

    # ------------------------------------------------------------------------------------------------ the folder

    def _start(self, resume: bool, overwrite: bool) -> dict[str, Any]:
        path = self.folder / RESULTS
        fresh: dict[str, Any] = {"machine": self.machine, "settings": self.settings.same_figures(), "rows": []}
        fresh["entries"] = {entry.label: entry.to_dict() for entry in self.entries}
        fresh = json.loads(json.dumps(fresh))
        if not path.exists() or overwrite:
            self.folder.mkdir(parents=True, exist_ok=True)
            return fresh
        if not resume:
            raise ValueError(
                f"{str(path)!r} holds results already; give --resume to add to them, --overwrite_output_dir to begin"
                " again, or another folder"
            )
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            old_settings, old_machine, old_entries = stored["settings"], stored["machine"], stored["entries"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{str(path)!r} is no result of this command; take another folder") from None
        for what, old, new in (("setting", old_settings, fresh["settings"]), ("machine", old_machine, self.machine)):
            differing = [name for name in new if old.get(name) != new[name]]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{str(path)!r} was measured with {what} {name}={old.get(name)!r}, not {new[name]!r}: figures"
                    " would not compare; take another folder, or --overwrite_output_dir"
                )
        changed = [label for label, entry in fresh["entries"].items() if old_entries.get(label, entry) != entry]
        if changed:
            raise ValueError(
                f"{str(path)!r} has another {changed[0]!r} ({old_entries[changed[0]]}); give the new one another label"
            )
        return {**stored, "entries": {**old_entries, **fresh["entries"]}}


def _recipe(entry: Entry) -> dict[str, Any]:
    return {**entry.to_dict(), "label": None}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["kind"], row["label"], row["shape"], row["at"], row.get("point", {}))
