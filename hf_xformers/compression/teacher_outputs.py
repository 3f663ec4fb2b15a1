# SPDX-License-Identifier: Apache-2.0
"""A teacher's outputs on disk: computed once for the rows of a task, in their order, and read by the number of a row.

about.json               what they are of; others are not read
rows-00000.safetensors   outputs of some rows, cut to their real tokens: '<row>.logits', '<row>.state.<layer>'
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.saved_files import read_object, safetensors_defect, write_json
from .methods import DistillationMethod
from .passes import teacher_pass

FOLDER, ABOUT = "teacher_outputs", "about.json"
ROWS_OF_FILE = 512
_NAMES = ("logits", "start_logits", "end_logits")


def refuse_storing(method: DistillationMethod) -> None:
    """Raises `ValueError` for a method whose teacher has to run next to the student."""
    if method.attention or method.replaces:
        what = "attention of all pairs of tokens" if method.attention else "layers themselves"
        raise ValueError(
            f"--store_teacher keeps predictions and states, and method {method.type!r} reads the teacher's {what};"
            " leave it out, or take --method distilbert or pkd"
        )


class StoredOutputs:
    """The outputs of a folder."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows = folder, rows
        self._files: dict[int, Any] = {}
        self._listed: dict[int, list[str]] = {}  # of each row, what there is

    @classmethod
    def make(
        cls,
        folder: Path,
        method: DistillationMethod,
        teacher: Any,
        features: Any,
        collator: Callable[[list], Mapping[str, Any]],
        *,
        about: Mapping[str, Any],
        batch_size: int,
        say: Callable[[str], None],
    ) -> StoredOutputs:
        """Computes what is not there yet. Files of other rows or of another teacher are replaced."""
        count = len(features)
        known = {**about, "rows": count, "states": method.reads_states}
        if (folder / ABOUT).is_file() and read_object(folder / ABOUT) != known:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ABOUT, known)
        made = cls(folder, count)
        for first in range(0, count, ROWS_OF_FILE):
            path = made.file(first)
            if path.is_file() and safetensors_defect(path) is None:
                continue
            last = min(first + ROWS_OF_FILE, count)
            tensors: dict[str, Tensor] = {}
            for start in range(first, last, batch_size):
                numbers = range(start, min(start + batch_size, last))
                tensors |= _outputs(method, teacher, collator([features[row] for row in numbers]), numbers)
            beside = path.with_suffix(".new")
            save_file(tensors, beside)
            beside.replace(path)
            say(f"outputs of the teacher: {last:,} of {count:,} rows")
        return made

    def file(self, row: int) -> Path:
        return self.folder / f"rows-{row // ROWS_OF_FILE:05d}.safetensors"

    def batch(self, rows: Tensor, mask: Tensor | None, device: torch.device) -> dict[str, Any]:
        """Outputs [B, ...] of some rows, tokens where `mask` [B, T] has real ones."""
        found: dict[str, list[Tensor]] = {}
        for row in rows.tolist():
            file = self._open(row)
            for name in self._listed[row]:
                found.setdefault(name, []).append(file.get_tensor(f"{row}.{name}"))
        laid = {name: _laid_out(name, parts, mask).to(device) for name, parts in found.items()}
        states = sorted((name for name in laid if name.startswith("state.")), key=lambda name: int(name[6:]))
        outputs: dict[str, Any] = {name: value for name, value in laid.items() if name in _NAMES}
        return {**outputs, "hidden_states": [laid[name] for name in states]} if states else outputs

    def _open(self, row: int) -> Any:
        number = row // ROWS_OF_FILE
        if number not in self._files:
            self._files[number] = safe_open(self.file(row), framework="pt")
            for key in self._files[number].keys():
                own, _, name = key.partition(".")
                self._listed.setdefault(int(own), []).append(name)
        return self._files[number]


def _outputs(
    method: DistillationMethod, teacher: Any, batch: Mapping[str, Any], rows: Sequence[int]
) -> dict[str, Tensor]:
    given = {name: value.to(teacher.device) for name, value in batch.items() if isinstance(value, Tensor)}
    taught, _ = teacher_pass(method, teacher, given, (0, 0))
    found = {name: taught[name] for name in _NAMES if taught.get(name) is not None}
    if method.reads_states:
        found |= {f"state.{number}": state for number, state in enumerate(taught["hidden_states"])}
    mask = given.get("attention_mask")
    tensors = {}
    for name, value in found.items():
        for place, row in enumerate(rows):
            part = value[place]
            if mask is not None and _of_tokens(name, part):
                part = part[mask[place].bool()]
            tensors[f"{row}.{name}"] = part.cpu().contiguous().clone()
    return tensors


def _of_tokens(name: str, row: Tensor) -> bool:
    """Whether a row's entry has one part for each token: `logits` may be of a whole text."""
    return name != "logits" or row.ndim > 1


def _laid_out(name: str, parts: list[Tensor], mask: Tensor | None) -> Tensor:
    """Of rows' real tokens a batch with zeros at padding; what has one entry for a row is stacked."""
    if mask is None or not _of_tokens(name, parts[0]):
        return torch.stack(parts)
    out = parts[0].new_zeros(*mask.shape, *parts[0].shape[1:])
    for place, part in enumerate(parts):
        out[place, mask[place].bool().cpu()] = part
    return out
