# SPDX-License-Identifier: Apache-2.0
"""Adapters on the Hub: what their folders say of the model that they adapt, and what of that is for others to read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.head_names import HEADS
from ..core.saved_files import read_object
from ..modeling.told_adapters import TASK_TYPES
from .card_metadata import IMPORT, head_of, own_imports
from .checkpoint_files import MARK, PEFT, Kind
from .training_record import is_hub_id, read_summary_of

CONFIGS: dict[str, str] = {"peft": "adapter_config.json", "bottleneck": "bottleneck_config.json"}
_BASE = {"peft": "base_model_name_or_path", "bottleneck": "base_model"}
_HEAD_OF_TASK = {task: f"For{head}" for head, task in TASK_TYPES.items()}
_LABELLED = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
_CLASSIFIERS = re.compile(r"(^|\.)(classifier|score)(\.out_proj)?\.weight$")
_CARD_ID = re.compile(r'from_pretrained\("([\w.-]+/[\w.-]+)"')


@dataclass
class Adapter:
    """
    Args:
        kind: PEFT's or bottleneck.
        method: "lora", "houlsby", ...
        head: as in For<head> of the model that it goes into, "Model" if nothing says.
        labels: names of the classes in their order.
        base: Hub id of that model; None: unknown.
        imports: lines that import what that model has of other packages.
    """

    kind: Kind
    method: str
    head: str
    labels: list[str] = field(default_factory=list)
    base: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    imports: list[str] = field(default_factory=list)

    @property
    def auto(self) -> str:
        return HEADS[self.head]

    def use(self, place: str, *, local: bool = False) -> list[str]:
        """The lines that load it from the Hub (local: from a folder of this machine), with the classes that it was
        trained on."""
        base, labels, classes = self.base or "USER/BASE-MODEL", [], ""
        if self.head in _LABELLED and self.labels:
            labels = [f"labels = {json.dumps(self.labels, ensure_ascii=False)}"]
            classes = ", id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)}"
        model = [f"from transformers import {self.auto}", "", *labels]
        load = f'model = {self.auto}.from_pretrained("{base}"{classes})'
        if self.kind == PEFT:
            ours = ["", IMPORT, *self.imports]
            end = f'model = PeftModel.from_pretrained(model, "{place}")'
            return ["from peft import PeftModel", model[0], *ours, *model[1:], load, end]
        ours = ["", "from hf_xformers.adapters import load_adapter", *self.imports]
        end = f'load_adapter(model, "{place}")' if local else f'load_adapter(model, snapshot_download("{place}"))'
        download = [] if local else ["from huggingface_hub import snapshot_download"]
        return [*download, model[0], *ours, *model[1:], load, end]


def read_adapter(folder: Path, kind: Kind, base_model: str | None = None) -> Adapter:
    """What an adapter's folder says. base_model: the Hub id of the model that it adapts, where the user gave it.

    Raises:
        ValueError: the config is no JSON object, or the weights cannot be read.
    """
    about = read_config(folder, kind)
    base = base_model or public_base(about.get(_BASE[kind]))
    imports = own_imports(about.get(_BASE[kind]) or base)
    if kind == PEFT:
        made_for = (about.get("auto_mapping") or {}).get("base_model_class")
        head = _HEAD_OF_TASK.get(str(about.get("task_type"))) or head_of(made_for or "")
        names = read_summary_of(folder).get("labels")
        labels = [str(name) for name in names] if isinstance(names, list) else _numbered(folder)
        method = str(about.get("peft_type", "adapter")).lower()
        return Adapter(kind, method, head, labels, base, made_for, imports=imports)
    method = str((about.get("adapter") or {}).get("kind", "bottleneck"))
    labels = [str(name) for name in (about.get("id2label") or {}).values()]
    architecture = about.get("architecture")
    model_type = about.get("model_type")
    return Adapter(kind, method, head_of(architecture or ""), labels, base, architecture, model_type, imports)


def read_config(folder: Path, kind: Kind) -> dict[str, Any]:
    return read_object(folder / CONFIGS[kind])


def public_config(folder: Path, kind: Kind, adapter: Adapter) -> bytes | None:
    """The adapter's config as it may be shared, where that differs: the base model by its id on the Hub.

    Raises:
        ValueError: the base is a place on this machine, and nothing says what it is called on the Hub.
    """
    about = read_config(folder, kind)
    key, changed = _BASE[kind], False
    given = about.get(key)
    if given and adapter.base is None:
        raise ValueError(
            f"the adapter in {str(folder)!r} belongs to the model {given!r}, which others cannot load from there; push"
            " that model first, and give its id with --base-model USER/NAME"
        )
    if adapter.base is not None and given != adapter.base:
        about, changed = {**about, key: adapter.base}, True
        if "revision" in about:
            about["revision"] = None  # that of another repository
    tokenizer = about.get("tokenizer_name_or_path")  # what a prompt was initialized with
    if tokenizer and public_base(tokenizer) != tokenizer:
        about, changed = {**about, "tokenizer_name_or_path": public_base(tokenizer) or adapter.base}, True
    return json.dumps(about, indent=2).encode() + b"\n" if changed else None


def public_base(name: Any) -> str | None:
    """The Hub id of a model that was loaded by `name`: the id itself, or that of a folder of the Hub's cache, or the
    one that a generated card in the folder names. None for any other place."""
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name).expanduser()
    if not folder.exists():
        return name if is_hub_id(name, "model") else None
    for part in folder.absolute().parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = _CARD_ID.search(text) if MARK in text else None
    return found[1] if found else None


def _numbered(folder: Path) -> list[str]:
    """Names for as many classes as the saved classifier has."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        sizes = [file.get_slice(key).get_shape()[0] for key in file.keys() if _CLASSIFIERS.search(key)]
    return [f"LABEL_{index}" for index in range(sizes[0])] if sizes else []
