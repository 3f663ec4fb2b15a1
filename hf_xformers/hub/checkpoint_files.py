"""Which files of a folder are the checkpoint, and which are the run's own."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Literal

from .flattening import VISIBLE

CONFIG = "config.json"
MODEL, PEFT, BOTTLENECK = "model", "peft", "bottleneck"
Kind = Literal["model", "peft", "bottleneck"]

# What makes a folder a checkpoint: (config, weights) by kind; an adapter's folder may hold a tokenizer too.
_MARKS: dict[Kind, tuple[str, str]] = {
    "peft": ("adapter_config.json", "adapter_model.safetensors"),
    "bottleneck": ("bottleneck_config.json", "bottleneck.safetensors"),
    "model": (CONFIG, "*.safetensors"),
}
_WEIGHTS = {
    "model": (CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    "peft": ("adapter_config.json", "adapter_model.safetensors"),
    "bottleneck": ("bottleneck_config.json", "bottleneck.safetensors"),
}
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
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
        ValueError: none of them, or weights that are not safetensors.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give the folder of a saved model or adapter")
    for kind, (config, weights) in _MARKS.items():
        if (folder / config).is_file():
            if any(folder.glob(weights)):
                return kind
            raise ValueError(
                f"{str(folder)!r} has {config} and no weights {weights}; save the model with `save_pretrained`, which writes "
                "safetensors"
            )
    raise ValueError(
        f"{str(folder)!r} is no checkpoint: it has no {CONFIG}; give the folder of a saved model or adapter"
    )


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Path in the repository -> file, for everything that belongs to the checkpoint: config, weights, tokenizer, card. States
    of the optimizer, logs, predictions and checkpoints of the run do not. Raises `ValueError` as [`kind_of`] does."""
    wanted = (*_WEIGHTS[kind_of(folder)], *_COMPANIONS)
    found = {}
    for path in sorted(p for p in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")) if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
            found[name] = path
    for name in sorted(_code(folder)):
        if (folder / name).is_file():
            found[name] = folder / name
    return found


def _code(folder: Path) -> set[str]:
    """The Python files that `auto_map` names, and what they import, as transformers' loader finds it."""
    waiting = [
        reference.partition(".")[0]
        for file in (CONFIG, "tokenizer_config.json")
        for reference in _references(folder / file)
        if "--" not in reference
    ]
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting += VISIBLE.findall((folder / name).read_text(encoding="utf-8", errors="replace"))
    return found


def _references(file: Path) -> list[str]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        return []
    values = entries.values() if isinstance(entries, dict) else entries
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]
