"""`hf-xformers list`: variants and components."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ..components import SLOTS
from .console import print_table
from .parser import CommandParser

SHAPES = {"encoder": "ForMaskedLM", "decoder": "ForCausalLM", "seq2seq": "ForSeq2SeqLM"}


def run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="hf-xformers list", description=__doc__, allow_abbrev=False)
    parser.add_argument("variant", nargs="*", help="only these variants, with or without 'xf_'")
    parser.add_argument(
        "--components",
        nargs="?",
        const="all",
        metavar="SLOT",
        help=f"components and their fields instead: of one slot ({', '.join(SLOTS)}) or of all",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    arguments = parser.parse_args(list(argv))
    if arguments.components is not None:
        show_components(arguments.components, arguments.json)
    else:
        show_variants(arguments.variant, arguments.json)
    return 0


def variants(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every variant (or those named): `id`, `changes`, `shapes`, `paper`, `url`, `cost`."""
    from ..variants import config_class, model_types, resolve

    entries = []
    for model_type in map(resolve, names) if names else model_types():
        cls = config_class(model_type)
        info = cls.info
        entries.append(
            {
                "id": model_type,
                "changes": info.summary,
                "shapes": [shape for shape, head in SHAPES.items() if head in cls.heads]
                or [f"{cls.modality} encoder"],
                "paper": info.paper,
                "url": info.url,
                "cost": info.cost,
            }
        )
    return entries


def components(slot: str) -> list[dict[str, Any]]:
    """Every component of a slot: `slot`, `name`, `summary`, `fields` with their defaults."""
    entries = []
    for name in SLOTS[slot]:
        cls = SLOTS[slot].get(name)
        entries.append({"slot": slot, "name": name, "summary": cls.summary, "fields": _defaults(cls)})
    return entries


def _defaults(cls: type) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = "required" if field.default is dataclasses.MISSING else field.default
    return defaults


def show_variants(names: Sequence[str], as_json: bool) -> None:
    entries = variants(names)
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    rows = [(entry["id"], entry["changes"], ", ".join(entry["shapes"]), entry["paper"]) for entry in entries]
    print_table(f"{len(rows)} variants", ("id", "what it changes", "shapes", "paper"), rows)


def show_components(slot: str, as_json: bool) -> None:
    if slot != "all" and slot not in SLOTS:
        raise ValueError(f"there is no slot {slot!r}: the slots are {', '.join(SLOTS)}")
    # cross_attention shares attention's components: listed when asked for, not twice.
    slots = [slot] if slot != "all" else [name for name in SLOTS if name != "cross_attention"]
    entries = [entry for name in slots for entry in components(name)]
    if as_json:
        print(json.dumps(entries, indent=2, default=str))
        return
    for name in slots:
        rows = [
            (
                entry["name"],
                entry["summary"],
                "\n".join(f"{key} = {value!r}" for key, value in entry["fields"].items()),
            )
            for entry in entries
            if entry["slot"] == name
        ]
        print_table(f"{name}: --{name} NAME --{name}.FIELD VALUE", ("name", "what it is", "fields"), rows)
