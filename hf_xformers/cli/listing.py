# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers list`: variants, components and objectives."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..core.components import SLOTS, did_you_mean
from ..core.specs import TypedSpec
from ..families import CHANGES, SURVEY, survey_number
from .console import print_facts, show
from .descriptions import SHAPES, component, components, own_components, own_defaults, replaced, variants
from .parser import CommandParser

_DESCRIPTION = """The variants, in the sections of "A Survey of Transformers" (Lin et al. 2022). With the name of a
variant: everything about it. With another word: the variants that mention it."""
_LEGEND = (
    "E encoder, D decoder, S encoder-decoder (seq2seq), I images, A audio. `hf-xformers list VARIANT` tells all about"
    " one."
)
_COLUMN = 22  # of the names


def run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(list(argv))
    _refuse_together(arguments)
    if arguments.objectives:
        _show_objectives(arguments.word, arguments.json)
        return 0
    if arguments.families:
        _show_families(arguments.word, arguments.json)
        return 0
    if arguments.components is not None:
        _show_components(arguments.components, arguments.word, arguments.json)
        return 0
    entries, named = _chosen(arguments.word)
    entries = [entry for entry in entries if _fits(entry, arguments)]
    if not entries:
        raise ValueError("no variant fits all of these conditions; leave one of them out")
    if arguments.json:
        print(
            json.dumps(
                [{**entry, **_details(entry["id"])} if named else entry for entry in entries], indent=2, default=str
            )
        )
    elif named:
        for number, entry in enumerate(entries):
            show() if number else None
            _show_variant(entry)
    else:
        _show_groups(entries)
    return 0


def _refuse_together(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options of which one would be ignored."""
    lists = [name for name in ("objectives", "families", "components") if getattr(arguments, name)]
    of_variants = [name for name in ("changes", "shape") if getattr(arguments, name)]
    if len(lists) > 1:
        raise ValueError(f"--{lists[0]} and --{lists[1]} are two lists; ask for one at a time")
    if lists and of_variants:
        raise ValueError(f"--{of_variants[0]} chooses variants, and --{lists[0]} lists none; leave one out")


def make_parser() -> CommandParser:
    parser = CommandParser(prog="hf-xformers list", description=_DESCRIPTION)
    parser.add_argument(
        "word", nargs="*", metavar="VARIANT|WORD", help="variants, with or without 'xf_', or words to look for"
    )
    parser.add_argument("--changes", choices=CHANGES, help="only variants that change this")
    parser.add_argument("--shape", choices=list(SHAPES), help="only variants that have a model of this shape")
    parser.add_argument(
        "--components",
        nargs="?",
        const="all",
        metavar="SLOT[.NAME]",
        help=(
            f"components instead: of a slot ({', '.join(SLOTS)}), or of all; with a name, or of a VARIANT, their"
            " fields are explained"
        ),
    )
    parser.add_argument(
        "--objectives", action="store_true", help="objectives of pretraining instead: all, or those that are named"
    )
    parser.add_argument(
        "--families", action="store_true", help="families of transformers that `hf-xformers convert` takes instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _chosen(words: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """The variants meant by the words, and whether each word names one. Raises ValueError where nothing is found."""
    from ..variants import model_types, resolve

    known = model_types()
    unknown = [word for word in words if word not in known and f"xf_{word}" not in known]
    if words and not unknown:
        return variants(list(dict.fromkeys(map(resolve, words)))), True
    wanted = [word.rstrip("s") or word for word in " ".join(words).lower().split()]  # documents, a document
    texts = [(entry, _text(entry)) for entry in variants()]
    found = [entry for entry, text in texts if all(word in text for word in wanted)]
    if not found:
        hint = did_you_mean(unknown[0].removeprefix("xf_"), [name.removeprefix("xf_") for name in known])
        raise ValueError(f"no variant is called {unknown[0]!r}, or mentions it.{hint} `hf-xformers list` shows all")
    return found, False


def _text(entry: dict[str, Any]) -> str:
    """What a search looks at: also what a variant's file says of it, and how many tokens it reads by default."""
    from ..variants import config_class

    cls = config_class(entry["id"])
    said = (
        sys.modules[cls.__module__].__doc__,
        cls.__doc__,
        cls.info.notes,
        f"{cls().max_position_embeddings} tokens",
    )
    section = SURVEY[entry["section"]].title
    known = (entry["id"], entry["changes"], entry["paper"], entry["cost"], section, *entry["kinds"])
    return " ".join(filter(None, (*known, *said))).lower()


def _fits(entry: dict[str, Any], arguments: argparse.Namespace) -> bool:
    return arguments.changes in (None, *entry["kinds"]) and arguments.shape in (None, *entry["shapes"])


def _show_groups(entries: Sequence[dict[str, Any]]) -> None:
    """A line or two for each variant, under the survey's sections."""
    show(f"{len(entries)} variant{'s' if len(entries) != 1 else ''}. {_LEGEND}")
    for key, section in SURVEY.items():
        group = [entry for entry in entries if entry["section"] == key]
        if not group:
            continue
        show()
        number = survey_number(key)
        show(section.title + (f" (survey {number})" if number else ""))
        for entry in group:
            shapes = "".join(shape[0].upper() for shape in entry["shapes"])
            name = entry["id"].removeprefix("xf_")
            if len(name) > _COLUMN:  # a line of its own, or the columns would not stand in line
                show(name, indent=1)
                name = ""
            show(f"{name:<{_COLUMN}} {shapes:<3} {entry['changes']}", indent=1, hanging=_COLUMN + 6)


def _show_variant(entry: dict[str, Any]) -> None:
    """Everything about a variant."""
    from ..variants import config_class

    cls = config_class(entry["id"])
    config = cls()
    section = SURVEY[entry["section"]]
    heads = {shape: head for shape, head in SHAPES.items() if head in cls.heads}
    print_facts(
        entry["id"],
        {
            "what it changes": entry["changes"],
            "survey": f"{survey_number(entry['section'])} {section.title}".strip(),
            "paper": f"{entry['paper']}, {entry['url']}",
            "cost": f"{entry['cost']} (T tokens, width D)",
            "shapes": ", ".join(heads) or None,
            "classes": ", ".join(cls.__name__.removesuffix("Config") + head for head in cls.heads),
            "notes": cls.info.notes or None,
        },
    )
    show()
    show("components (* not those of a plain Transformer); set with --SLOT.FIELD VALUE", indent=0)
    changed = replaced(config)
    for slot, spec in own_components(config):
        _show_component(component(slot, spec), changed=(slot, spec) in changed, explain=(slot, spec) in changed)
    own = own_defaults(cls)
    settings = own.pop("pretraining", {})
    if own:
        show()
        show("configuration fields with defaults of its own; set with --FIELD VALUE")
        show(", ".join(f"{name}={_value(value)}" for name, value in own.items()), indent=2)
    if settings:
        show()
        show("settings of its pretraining; objectives set them, see hf-xformers list --objectives")
        for name, values in settings.items():
            show(name + ": " + ", ".join(f"{field}={_value(value)}" for field, value in values.items()), indent=2)
    show()
    show("use")
    for line in _usage(cls, heads):
        show(line, indent=2, hanging=6)


def _usage(cls: Any, heads: dict[str, str]) -> list[str]:
    name = cls.model_type.removeprefix("xf_")
    auto = next((f"AutoModelF{head[1:]}" for head in heads.values()), "AutoModel")
    lines = []
    if not {"image", "audio"} & set(heads):
        lines.append(f"hf-xformers pretrain --variant {name} --data FILE --output_dir DIR")
    lines += [
        "from transformers import AutoConfig, " + auto,
        "import hf_xformers",
        f'config = AutoConfig.for_model("{cls.model_type}")',
        f"model = {auto}.from_config(config)",
    ]
    return lines


def _details(model_type: str) -> dict[str, Any]:
    from ..variants import config_class

    cls = config_class(model_type)
    return {
        "classes": [cls.__name__.removesuffix("Config") + head for head in cls.heads],
        "notes": cls.info.notes,
        "components": [component(slot, spec) for slot, spec in own_components(cls())],
        "fields": own_defaults(cls),
    }


# ------------------------------------------------------------------------------------------------ components


def _show_components(where: str, words: Sequence[str], as_json: bool) -> None:
    from ..variants import model_types

    slot, _, name = where.partition(".")
    if slot in model_types() or f"xf_{slot}" in model_types():
        raise ValueError(
            f"--components {slot!r} is a variant and no slot; `hf-xformers list {slot} --components` shows its"
            " components"
        )
    if slot not in SLOTS and (slot != "all" or name):
        raise ValueError(f"there is no slot {slot!r}.{did_you_mean(slot, SLOTS)} The slots are {', '.join(SLOTS)}")
    if words and name:
        raise ValueError(f"{where!r} names a component, and {words[0]!r} a variant that has its own; leave one out")
    if words:
        entries, explain = _of_variants(words, slot), True
    elif name:
        entries, explain = [component(slot, SLOTS[slot].get(name))], True
    else:
        # cross_attention shares attention's components: listed when asked for, not twice.
        slots = [slot] if slot != "all" else [key for key in SLOTS if key != "cross_attention"]
        entries, explain = [entry for key in slots for entry in components(key)], False
    if as_json:
        print(json.dumps(entries, indent=2, default=str))
        return
    for key in dict.fromkeys(entry["slot"] for entry in entries):
        show(f"{key}: --{key} NAME --{key}.FIELD VALUE")
        for entry in entries:
            if entry["slot"] == key:
                _show_component(entry, explain=explain, slot=False)
    if not explain:
        show()
        show("`hf-xformers list --components SLOT.NAME` explains the fields of one.")


def _show_objectives(names: Sequence[str], as_json: bool) -> None:
    """The objectives: what each predicts, corrupts and needs; the fields of those that are named are explained."""
    from ..objectives.description import needs
    from ..training.building import language_objective, language_objectives

    chosen = [language_objective(name) for name in names] or list(language_objectives().values())
    entries = [
        {
            **component("objective", cls),
            "shape": cls.shape,
            "head": f"For{cls.head}",
            "rows": cls.rows,
            "corrupts": cls.corrupts,
            "needs": needs(cls),
        }
        for cls in chosen
    ]
    if as_json:
        print(json.dumps(entries, indent=2, default=str))
        return
    show("objective: --objective NAME --objective.FIELD VALUE")
    for number, entry in enumerate(entries):
        show() if number else None
        show(f"  {entry['name']}: {entry['summary']}", hanging=6)
        show(f"corrupts {entry['corrupts']}", indent=6, hanging=10) if entry["corrupts"] else None
        show(f"needs {entry['needs']}", indent=6, hanging=10)
        _show_fields(entry, explain=bool(names))
    if not names:
        show()
        show("`hf-xformers list --objectives NAME` explains the settings of one.")


def _show_families(words: Sequence[str], as_json: bool) -> None:
    """Transformers' model types that convert, what they become, and the heads that come along."""
    from ..conversion import converters

    entries = [
        {
            "model_type": name,
            "variant": entry.variant,
            "heads": list(dict.fromkeys(head.ours for head in entry.heads)),
        }
        for name, entry in sorted(converters().items())
        if all(word.lower() in f"{name} {entry.variant}" for word in words)
    ]
    if not entries:
        raise ValueError(f"no family of transformers that converts mentions {' '.join(words)!r}; leave the word out")
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    plural = "family" if len(entries) == 1 else "families"
    show(f"{len(entries)} {plural} of transformers, what each becomes (xformer: freely mixed components), and heads.")
    show()
    for entry in entries:
        heads = ", ".join(head.removeprefix("For") for head in entry["heads"])
        show(f"{entry['model_type']:<{_COLUMN}} {entry['variant']}: {heads}", hanging=_COLUMN + 1)


def _of_variants(words: Sequence[str], slot: str) -> list[dict[str, Any]]:
    from ..variants import config_class, resolve

    found = []
    for model_type in map(resolve, words):
        found += [
            component(key, spec) for key, spec in own_components(config_class(model_type)()) if slot in ("all", key)
        ]
    return [entry for number, entry in enumerate(found) if entry not in found[:number]]


def _show_component(entry: dict[str, Any], *, changed: bool = False, explain: bool, slot: bool = True) -> None:
    """A component, with the meaning of its fields a line each, or with their defaults alone."""
    title = f"{entry['slot']}: {entry['name']}" if slot else entry["name"]
    show(f"{'*' if changed else ' '} {title}: {entry['summary']}" if entry["summary"] else f"  {title}", hanging=6)
    _show_fields(entry, explain=explain)


def _show_fields(entry: dict[str, Any], *, explain: bool) -> None:
    """The fields of a component or an objective."""
    fields = {name: _value(value) for name, value in entry["fields"].items()}
    if not explain:
        show(", ".join(f"{name}={text}" for name, text in fields.items()), indent=6) if fields else None
        return
    for name, text in fields.items():
        aliases = "".join(f" (or {alias})" for alias in entry["aliases"].get(name, ()))
        show(f"{name}{aliases} = {text}: {entry['meanings'].get(name, '')}", indent=6, hanging=10)


def _value(value: Any) -> str:
    """A value as an option takes it."""
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (list, tuple)) for item in value):
        return ",".join(map(str, value)) or "[]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value.type if isinstance(value, TypedSpec) else str(value)
