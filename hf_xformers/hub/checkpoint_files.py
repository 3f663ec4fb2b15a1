# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are the checkpoint, and which are the run's own."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Literal

from ..conversion.sentence_files import MODULES, open_sentence_files
from ..core.saved_files import WEIGHTS, refuse_damaged_weights, safetensors_defect, weight_files
from .flattening import VISIBLE

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
# The last line of a generated card: by it a later push knows that nobody has written the card by hand.
MARK = "<!-- written by hf-xformers push, which will replace this card; delete this line to keep your own text -->"
Kind = Literal["model", "peft", "bottleneck"]
MODEL: Kind = "model"
PEFT: Kind = "peft"
BOTTLENECK: Kind = "bottleneck"

# What makes a folder a checkpoint: (config, weights) by kind; an adapter's folder may hold a tokenizer too.
_MARKS: dict[Kind, tuple[str, str]] = {
    "peft": ("adapter_config.json", "adapter_model.safetensors"),
    "bottleneck": ("bottleneck_config.json", "bottleneck.safetensors"),
    "model": (CONFIG, "*.safetensors"),
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-][\w.-]*")
_WEIGHTS = {
    "model": (CONFIG, "generation_config.json"),  # and what it is loaded from
    "peft": ("adapter_config.json", "adapter_model.safetensors"),
    "bottleneck": ("bottleneck_config.json", "bottleneck.safetensors"),
}
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",  # of SentencePiece
    "*.spm",  # the same, of Marian
    "target_vocab.json",
    "bpe.codes",  # of PhoBERT
    "dict.txt",  # of BARTpho
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.*",
)


def kind_of(folder: Path) -> Kind:
    """Whether a folder holds a model, a PEFT adapter or a bottleneck adapter.

    Raises:
        ValueError: none of them, weights that are damaged, or none that are safetensors.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give the folder of a saved model or adapter")
    refuse_damaged_weights(folder)
    for kind, (config, weights) in _MARKS.items():
        if (folder / config).is_file():
            if _model_weights(folder) if kind == MODEL else (folder / weights).is_file():
                problem = None if kind == MODEL else safetensors_defect(folder / weights)
                if problem is not None:
                    raise ValueError(f"{str(folder / weights)!r} {problem}; save or download the adapter again")
                return kind
            raise ValueError(
                f"{str(folder)!r} has {config} and no weights {weights}; save the model with `save_pretrained`, which"
                " writes safetensors"
            )
    raise ValueError(
        f"{str(folder)!r} is no checkpoint: it has no {CONFIG}; give the folder of a saved model or adapter"
    )


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Path in the repository -> file, for everything that belongs to the checkpoint: config, weights, tokenizer, card.
    States of the optimizer, logs, predictions and checkpoints of the run do not.

    Raises:
        ValueError: as [`kind_of`] does, and for a file that is a link, or code that `auto_map` names outside the
            folder: what such a name stands for is not the checkpoint's, and nobody asked to share it.
    """
    kind = kind_of(folder)
    wanted = (*_WEIGHTS[kind], *_COMPANIONS)
    weights = _model_weights(folder) if kind == MODEL else set()
    found = {}
    for path in sorted(p for p in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")) if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in weights or any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
            found[name] = _own(folder, name)
    sentence = open_sentence_files(folder)
    further = [] if sentence is None else [MODULES, *sentence.files()]
    for name in (*sorted(_code(folder)), *further):
        found[name] = _own(folder, name)
    return found


def _model_weights(folder: Path) -> set[str]:
    """What a model is loaded from, as safetensors: one file, or shards with their index."""
    names = {path.name for path in weight_files(folder) if path.suffix == ".safetensors"}
    return names if names <= {WEIGHTS[0]} else {*names, f"{WEIGHTS[0]}.index.json"}


def _own(folder: Path, name: str) -> Path:
    """A file of the folder. Raises `ValueError` for one that lies elsewhere, or is a link to another."""
    root, path = folder.resolve(), folder / name
    place = path.resolve()
    # The Hub's cache holds a snapshot as links to its own blobs, which are files of the same repository.
    blobs = root.parent.parent / "blobs"
    cached = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    if place != root / name and not (cached and place.parent == blobs):
        raise ValueError(
            f"{str(path)!r} is a link to {str(place)!r}; only files of the folder itself are shared: remove the link,"
            " or put a copy of the file in its place"
        )
    return path


def _code(folder: Path) -> set[str]:
    """The Python files that `auto_map` names, and what they import, as transformers' loader finds it.

    Raises:
        ValueError: a name of a file that is not in the folder itself.
    """
    waiting: list[str] = []
    for file in (CONFIG, PROCESSOR, "tokenizer_config.json"):
        for reference in _references(folder / file):
            repository, apart, entry = reference.rpartition("--")
            module = entry.partition(".")[0]
            if not module.isidentifier() or (apart and _REPOSITORY.fullmatch(repository) is None):
                raise ValueError(
                    f"`auto_map` of {str(folder / file)!r} names the code {reference!r}, which is no file of the"
                    " folder; correct the entry to `file.Class`, or remove it"
                )
            if not apart:  # else the code stays in the repository that it is in
                waiting.append(module)
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found and (folder / name).is_file():
            found.add(name)
            text = _own(folder, name).read_text(encoding="utf-8", errors="replace")
            waiting += [module for module in VISIBLE.findall(text) if module.isidentifier()]
    return found


def _references(file: Path) -> list[str]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        return []
    values = entries.values() if isinstance(entries, dict) else entries
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]
