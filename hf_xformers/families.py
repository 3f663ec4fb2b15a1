# SPDX-License-Identifier: Apache-2.0
"""Families: from one config class its model classes, named and registered with transformers' Auto classes.

A family is made in the variant's own file:

```python
family = make_family(XFPerformerConfig, "XFPerformer", heads=ALL_SHAPES)
XFPerformerModel = family["Model"]
```
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .auto_classes import enter_type, register_config, register_model
from .configuration_xformer import XFormerConfig
from .core.components import SLOTS, build_spec
from .core.head_names import (
    ALL_HEADS,
    DECODER_HEADS,
    ENCODER_HEADS,
    FREE_HEADS,
    HEADS,
    IMAGE_HEADS,
    SENTENCE_PAIR_HEADS,
    SEQ2SEQ_HEADS,
    SERVED,
    SOUND_HEADS,
)
from .core.inputs import naming
from .core.other_families import enter_family
from .modeling.head_classes import CLASSES, MODALITY_CLASSES


@dataclass(frozen=True)
class Section:
    """A section of *A Survey of Transformers* (Lin et al. 2022): its title, and what its systems change, one of
    `CHANGES`."""

    title: str
    changes: str


# What a system can change, as lists group it.
CHANGES = ("attention", "position", "normalization", "feedforward", "architecture", "training")
# The survey's sections, in the order of lists; further keys are for what the survey does not know.
SURVEY = {
    "2": Section("The vanilla Transformer", "architecture"),
    "4.1": Section("Sparse attention", "attention"),
    "4.2": Section("Linearized attention", "attention"),
    "4.3": Section("Attention over compressed keys and values", "attention"),
    "4.4": Section("Low-rank attention", "attention"),
    "4.5": Section("Attention with a prior", "attention"),
    "4.6": Section("Improved multi-head mechanisms", "attention"),
    "5.1": Section("Positions", "position"),
    "5.2": Section("Normalization", "normalization"),
    "5.3": Section("Feed-forward networks", "feedforward"),
    "6.1": Section("Lighter architectures", "architecture"),
    "6.2": Section("Connections across layers", "architecture"),
    "6.3": Section("Adaptive computation", "architecture"),
    "6.4": Section("Long texts in parts: recurrence and hierarchies", "architecture"),
    "6.5": Section("Other arrangements of a layer", "architecture"),
    "7": Section("Pretrained families", "training"),
    "8": Section("Applications: images and sound", "training"),
    "successors": Section("After the survey", "attention"),
    "": Section("Beyond the survey", "architecture"),
}


def survey_number(section: str) -> str:
    """The survey's own number of a section; empty for what the survey does not know."""
    return section if section[:1].isdigit() else ""


@dataclass(frozen=True)
class VariantInfo:
    """What lists and cards say about a variant.

    Args:
        section: of the survey, a key of `SURVEY`.
        summary: what it changes, in a line.
        paper, url: where it was proposed.
        equation: its defining formula (LaTeX).
        cost: time and memory in T (tokens).
        cite: keys in `variants/references.bib`, with commas between them.
        bibtex: an entry that does not stand there.
    """

    summary: str
    paper: str
    url: str
    equation: str
    cost: str
    bibtex: str = ""
    notes: str = ""
    section: str = ""
    cite: str = ""

    def __post_init__(self) -> None:
        if not (self.cite or self.bibtex):
            raise ValueError(f"Nothing says how to cite {self.paper!r}; give `cite`, or an entry as `bibtex`.")
        if self.section not in SURVEY:
            raise ValueError(f"There is no section {self.section!r} of the survey; take one of {', '.join(SURVEY)}.")

    @property
    def citation(self) -> str:
        """BibTeX entries. Raises `LookupError` for a key that `references.bib` has not."""
        keys = [key.strip() for key in self.cite.split(",") if key.strip()]
        return "\n\n".join([*(references()[key] for key in keys), *([self.bibtex.strip()] if self.bibtex else [])])


@functools.cache
def references() -> dict[str, str]:
    """The entries of `variants/references.bib` by their keys."""
    text = Path(__file__).with_name("variants").joinpath("references.bib").read_text(encoding="utf-8")
    entries = [entry.strip() for entry in re.split(r"^(?=@)", text, flags=re.MULTILINE) if entry.strip()]
    return {re.split(r"[{,]", entry)[1]: entry for entry in entries}


def field_defaults(config_class: Any) -> dict[str, Any]:
    """The default of every field of a config, by name; presets that are dicts are made anew."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config_class)
    }


def _documented(config_class: Any) -> str:
    """The docstring of a variant's config: its own, what the preset chooses, and what every field means."""
    own = inspect.cleandoc(config_class.__doc__ or "")
    if config_class is XFormerConfig:
        return own
    defaults, general = field_defaults(config_class), field_defaults(XFormerConfig)
    chosen = [
        f"    {name}: {default!r}"
        for name, default in defaults.items()
        if name not in general or general[name] != default
    ]
    parts = (
        [own, "Fields whose defaults differ from those of `XFormerConfig`:\n" + "\n".join(chosen)] if chosen else [own]
    )
    _, args, fields = inspect.cleandoc(XFormerConfig.__doc__ or "").partition("Args:\n")
    return "\n\n".join([*parts, args + fields])


def _register(head: str, config_class: Any, made: Any) -> None:
    register_model(HEADS[head], config_class, made)
    if head in SERVED:
        register_model(SERVED[head], config_class, made)


def _inputs(config_class: Any) -> tuple[str, ...]:
    """The further inputs that a config's default components read."""
    found: list[str] = []
    for slot, value in field_defaults(config_class).items():
        if slot in SLOTS:
            try:
                found += build_spec(slot, value).inputs
            except ValueError:
                if __name__.partition(".")[0] == "hf_xformers":
                    raise
                # This is the code of a checkpoint, which has no use for the family that shares a file with its parts.
    return tuple(dict.fromkeys(found))


def make_family(
    config_class: Any,
    prefix: str,
    heads: tuple[str, ...],
    info: VariantInfo,
    *,
    further: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Makes `prefix + head` for each of `heads`, registers config and classes with the Auto classes.

    config_class: an `XFormerConfig` subclass with its own `model_type`. further: by head the name of a second Auto
    class that finds it, where its texts are something else, such as images. Returns the classes by head name, and
    gives the caller's module their names, where imports, pickle and `from_pretrained` find them.

    Raises:
        ValueError: unknown head name, a model type that another module has, or a field without a type.
    """
    unknown = [head for head in heads if head not in HEADS]
    if unknown:
        raise ValueError(f"Unknown head {unknown[0]!r}; heads are: {', '.join(HEADS)}.")
    fields = {field.name for field in dataclasses.fields(config_class)}
    plain = sorted(fields & vars(config_class).keys() - inspect.get_annotations(config_class).keys())
    if plain:
        raise ValueError(
            f"`{plain[0]}` of {config_class.__qualname__} has no type, so that configs would not read it; write"
            f" `{plain[0]}: {'SpecLike' if plain[0] in SLOTS else 'TYPE'} = ...`."
        )
    module = sys._getframe(1).f_globals
    register_config(config_class)
    family: dict[str, Any] = {}
    inputs = _inputs(config_class)
    classes = {**CLASSES, **MODALITY_CLASSES.get(config_class.modality, {})}
    for head in heads:
        if head not in classes:  # this is the code of a checkpoint, which has no use for the head
            family[head] = None
            continue
        base = classes[head]
        name = prefix + head
        if base.config_class is config_class and base.__name__ == name:  # the free mix is the base classes themselves
            _register(head, config_class, base)
            family[head] = base
            continue
        doc = f"{(base.__doc__ or '').splitlines()[0]} {info.summary[0].upper()}{info.summary[1:]} ({info.paper})."
        members = {"config_class": config_class, "__module__": module["__name__"], "__doc__": doc}
        members["forward"] = naming(base.forward, inputs)
        made = type(name, (base,), members)
        _register(head, config_class, made)
        if further is not None and head in further:
            register_model(further[head], config_class, made)
        family[head] = made
    if family.get("ForSeq2SeqLM") and "ForCausalLM" not in heads:
        enter_type("AutoModelForSeq2SeqLM", family["ForSeq2SeqLM"])
    module.update({prefix + head: made for head, made in family.items()})
    config_class.info = info
    config_class.__doc__ = _documented(config_class)
    config_class.heads = tuple(head for head in heads if family[head] is not None)
    if not module["__name__"].startswith("hf_xformers."):
        enter_family(config_class.model_type, module["__name__"])
    return family


__all__ = [
    "ALL_HEADS",
    "CHANGES",
    "DECODER_HEADS",
    "ENCODER_HEADS",
    "FREE_HEADS",
    "HEADS",
    "IMAGE_HEADS",
    "SENTENCE_PAIR_HEADS",
    "SEQ2SEQ_HEADS",
    "SERVED",
    "SOUND_HEADS",
    "SURVEY",
    "Section",
    "VariantInfo",
    "field_defaults",
    "make_family",
    "references",
    "survey_number",
]
