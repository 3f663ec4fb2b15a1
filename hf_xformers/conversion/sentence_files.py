# SPDX-License-Identifier: Apache-2.0
"""What sentence-transformers keeps with a model: the modules that make one vector of a text's states (pooling, dense
layers, normalization), how much of a text is read, and prompts."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import cached_file

from ..core.saved_files import read_object, write_json

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
_SETTINGS = "sentence_*_config.json"  # of the model's own module: in early releases the name had a family in it
_TASK = "feature-extraction"


@dataclass(frozen=True)
class SentenceFiles:
    """folder: where they are. modules: the content of modules.json, the model's own first."""

    folder: Path
    modules: list[dict[str, Any]]

    @property
    def own(self) -> Path:
        """The folder of the model itself."""
        return self.folder / self.modules[0]["path"]

    @property
    def foreign(self) -> str | None:
        """The first module whose code is none of sentence-transformers'."""
        types = (str(module["type"]) for module in self.modules)
        return next((name for name in types if not name.startswith("sentence_transformers.")), None)

    @property
    def reads_states(self) -> bool:
        """Whether it is the bare model that is read, whatever class config.json names."""
        task = next((read_object(path).get("transformer_task") for path in self._settings()), None)
        return self.modules[0]["type"].endswith(".Transformer") and task in (None, _TASK)

    def _settings(self) -> list[Path]:
        return sorted(self.own.glob(_SETTINGS))

    def files(self) -> dict[str, Path]:
        """Path in a folder -> file, as they are saved today: the model lies in the folder itself."""
        found = {path.name: path for path in (self.folder / PROMPTS, *self._settings()) if path.is_file()}
        for module in self.modules[1:]:
            place = self.folder / module["path"]
            if place == self.folder:  # a module without files
                continue
            inside = sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".py")
            found |= {path.relative_to(self.folder).as_posix(): path for path in inside}
        return found

    def save(self, target: Path, length: int | None, notes: list[str]) -> None:
        """Copies them next to a converted model. length: tokens that it is to read now; None: as many as before."""
        if self.foreign is not None:
            notes.append(
                f"sentence-transformers' files are left out: the module {self.foreign!r} is code of its own, which is"
                " never run; say how to pool when you load the model there"
            )
            return
        for name, path in self.files().items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            settings = read_object(path) if path in self._settings() and length is not None else {}
            if "max_seq_length" in settings:
                write_json(target / name, {**settings, "max_seq_length": length})
            else:
                shutil.copyfile(path, target / name)
        write_json(target / MODULES, [{**self.modules[0], "path": ""}, *self.modules[1:]])


def open_sentence_files(source: str | Path) -> SentenceFiles | None:
    """Those of a folder or Hub id; None where it is no model of sentence-transformers.

    Raises:
        ValueError: its modules.json is no list of modules in folders of its own.
    """
    name, folder = os.fspath(source), Path(os.fspath(source)).expanduser()
    remote = not folder.is_dir()
    if remote:
        if folder.is_absolute() or name.count("/") > 1:
            return None
        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        try:
            found = cached_file(name, MODULES, **missing)
        except (OSError, ValueError):  # no repository: said where the model is read
            return None
        if found is None:
            return None
        folder = Path(found).parent
    if not (folder / MODULES).is_file():
        return None
    modules = _modules(folder / MODULES)
    if remote:
        inside = [f"{module['path']}/*" for module in modules if module["path"]]
        folder = Path(snapshot_download(name, allow_patterns=[MODULES, PROMPTS, _SETTINGS, *inside]))
    return SentenceFiles(folder, modules)


def model_place(source: str | Path, sentence: SentenceFiles | None) -> str | Path:
    """Where the model of `source` is: in early releases of sentence-transformers, in a folder within."""
    return sentence.own if sentence is not None and sentence.modules[0]["path"] else source


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        places = [PurePosixPath(module["path"]) for module in modules if str(module["type"])]
        within = not any(place.is_absolute() or ".." in place.parts for place in places)
    except (ValueError, KeyError, TypeError):
        within, modules = False, []
    if not modules or not within:
        raise ValueError(
            f"{str(path)!r} is no list of sentence-transformers' modules, each with `type` and `path`; copy or"
            " download it again, or remove it to convert the model alone"
        )
    return modules
