# SPDX-License-Identifier: Apache-2.0
"""What lists say about variants and components, taken from their classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..core.components import SLOTS, Spec, field_aliases
from ..core.field_docs import meanings
from ..core.specs import default_of
from ..families import CHANGES, SURVEY, survey_number
from ..objectives import Objective

# Shape -> the head whose class a family has for it.
SHAPES = {
    "encoder": "ForMaskedLM",
    "decoder": "ForCausalLM",
    "seq2seq": "ForSeq2SeqLM",
    "image": "ForImageClassification",
    "audio": "ForCTC",
}
# What a variant has to have instead before it counts as a change of that slot.
_PLAIN = {
    "embedding": ("token", "patch", "frames"),
    "position": ("none", "sinusoidal_absolute", "learned_absolute"),
    "attention": ("dense",),
    "cross_attention": ("dense",),
    "normalization": ("layer_norm",),
    "residual": ("post_ln", "pre_ln"),
    "feedforward": ("relu", "gelu"),
    "block": ("vanilla",),
    "stack": ("plain",),
    "head": ("linear", "transform"),
}
# Which of the survey's kinds of change the component of a slot is.
_KIND = {
    "position": "position",
    "attention": "attention",
    "cross_attention": "attention",
    "normalization": "normalization",
    "residual": "normalization",
    "feedforward": "feedforward",
    "block": "architecture",
    "stack": "architecture",
}


def variants(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every variant (or those named): `id`, `changes`, `section` of the survey, `kinds` of change, `shapes`, `paper`,
    `url`, `cost`."""
    from ..variants import config_class, model_types, resolve

    entries = []
    for model_type in map(resolve, names) if names else model_types():
        cls = config_class(model_type)
        info = cls.info
        entries.append(
            {
                "id": model_type,
                "changes": info.summary,
                "section": info.section,
                "kinds": kinds(cls),
                "shapes": [shape for shape, head in SHAPES.items() if head in cls.heads],
                "paper": info.paper,
                "url": info.url,
                "cost": info.cost,
            }
        )
    return entries


def kinds(config_class: Any) -> list[str]:
    """What a variant changes, of `CHANGES`: what its section of the survey is about, and the kinds of its
    components."""
    section = config_class.info.section
    found = {SURVEY[section].changes} if survey_number(section) else set()
    found |= {_KIND[slot] for slot, _ in replaced(config_class()) if slot in _KIND}
    return [kind for kind in CHANGES if kind in found]


def replaced(config: Any) -> list[tuple[str, Spec]]:
    """(slot, component) wherever a layer or tower of a config has another component than a plain Transformer."""
    found: list[tuple[str, Spec]] = []
    for view in config.layer_configs():
        for slot, plain in _PLAIN.items():
            spec = getattr(view, slot)
            if spec.type not in plain and (slot, spec) not in found:
                found.append((slot, spec))
    return found


def own_components(config: Any) -> list[tuple[str, Spec]]:
    """(slot, component) of a variant's config, each once where layers differ; cross-attention where it has any."""
    found: list[tuple[str, Spec]] = []
    for slot in SLOTS:
        for view in config.layer_configs() if slot != "cross_attention" or "ForSeq2SeqLM" in config.heads else ():
            if (slot, getattr(view, slot)) not in found:
                found.append((slot, getattr(view, slot)))
    return found


def own_defaults(config_class: Any) -> dict[str, Any]:
    """A variant's configuration fields (not its components) that differ from the free mix's, with their defaults."""
    from ..configuration_xformer import XFormerConfig
    from .arguments import offered_fields

    general, own = XFormerConfig(), config_class()
    known = {field.name for field in dataclasses.fields(general)}
    names = [name for name in offered_fields(config_class) if name != "per_layer_config"]
    found = {
        name: getattr(own, name) for name in names if name not in known or getattr(own, name) != getattr(general, name)
    }
    if own.pretraining:
        found["pretraining"] = {name: spec.plain() for name, spec in own.pretraining.items()}
    return found


def components(slot: str) -> list[dict[str, Any]]:
    """Every component of a slot: as [`component`]."""
    return [component(slot, SLOTS[slot].get(name)) for name in SLOTS[slot]]


def component(slot: str, spec: type[Spec] | type[Objective] | Spec) -> dict[str, Any]:
    """Of a component, or of an objective: `slot`, `name`, `summary`, and of the fields: `fields` with their defaults
    (of a spec object: its values), `aliases` and `meanings`."""
    cls = spec if isinstance(spec, type) else type(spec)
    aliases: dict[str, list[str]] = {}
    for alias, field in field_aliases(cls).items():
        aliases.setdefault(field, []).append(alias)
    values = _defaults(cls) if spec is cls else {name: getattr(spec, name) for name in _defaults(cls)}
    return {
        "slot": slot,
        "name": cls.type,
        "summary": cls.summary,
        "fields": values,
        "aliases": aliases,
        "meanings": meanings(cls),
    }


def _defaults(cls: type) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    return {field.name: "required" if field.name in needed else default_of(cls, field.name) for field in fields}
