"""What there is in the package, and where its page is: variants, components, objectives."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_xformers.core.components import SLOTS
from hf_xformers.families import SURVEY, survey_number
from hf_xformers.objectives import OBJECTIVES
from hf_xformers.variants import config_class, model_types

from . import survey
from .markup import ROOT

SLOT_NAMES = tuple(slot for slot in SLOTS if slot != "cross_attention")  # which has attention's components


@dataclass(frozen=True)
class Place:
    """Where something is explained: the page (with an anchor), a title for links to it, and a line about it."""

    page: str
    title: str
    summary: str = ""


@functools.cache
def variants() -> dict[str, Any]:
    """Short id (`luna`) -> config class, of every variant, by name."""
    return {model_type.removeprefix("xf_"): config_class(model_type) for model_type in model_types()}


@functools.cache
def components(slot: str) -> dict[str, Any]:
    """Name -> spec class of every component of a slot."""
    return {name: SLOTS[slot].get(name) for name in SLOTS[slot]}


def objectives() -> dict[str, Any]:
    """Name -> class of every objective."""
    return {name: OBJECTIVES[name] for name in sorted(OBJECTIVES)}


def variant_title(name: str) -> str:
    """What the survey's tree calls a variant, or else what its own docstring does: "Luna (Ma et al. 2021): ..."."""
    known = survey.titles().get(name)
    if known:
        return known
    first = (variants()[name].__doc__ or "").strip().splitlines()[0]
    return re.split(r" \(|: ", first)[0] if re.search(r" \(|: ", first) else name.replace("_", " ").capitalize()


def variant_page(name: str) -> str:
    return f"zoo/{name}.md"


def component_page(slot: str, name: str = "") -> str:
    return f"zoo/components/{slot}.md" + (f"#{name}" if name else "")


def objective_page(name: str) -> str:
    return f"objectives/{name}.md"


def place(at: str) -> Place | None:
    """The place that an entry of the survey's tree names; None for a page that is not there."""
    if at in variants():
        return Place(variant_page(at), variant_title(at), variants()[at].info.summary)
    kind, _, name = at.partition(".")
    if kind == "objective" and name in OBJECTIVES:
        return Place(objective_page(name), f"objective {name}", OBJECTIVES[name].summary)
    if kind in SLOTS and name in components(kind):
        return Place(component_page(kind, name), f"{kind} {name}", components(kind)[name].summary)
    if at.endswith(".md"):
        there = at.startswith("api/") or (ROOT / "docs" / at).exists()
        return Place(at, "guide: " + Path(at).stem.replace("-", " ")) if there else None
    raise ValueError(f"survey.toml names {at!r}, which is no variant, component, objective or page.")


def by_section() -> dict[str, list[str]]:
    """Section of the survey -> variants in it, by title; sections without any are left out."""
    found: dict[str, list[str]] = {section: [] for section in SURVEY}
    for name, cls in variants().items():
        found[cls.info.section].append(name)
    return {
        section: sorted(names, key=lambda name: variant_title(name).lower())
        for section, names in found.items()
        if names
    }


def section_title(section: str) -> str:
    title = SURVEY[section].title
    number = survey_number(section)
    return f"{number} {title}" if number else title


@functools.cache
def built_class(spec: type) -> type | None:
    """The module class that a spec's `build` says it returns, where it has a docstring of its own."""
    annotation = inspect.get_annotations(spec.build).get("return", "")
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    found = getattr(importlib.import_module(spec.build.__module__), name.strip("'\""), None)
    return found if isinstance(found, type) and vars(found).get("__doc__") else None


def file_of(cls: type) -> str:
    """The file of a class, from the root of the repository."""
    return str(Path(inspect.getsourcefile(cls) or "").resolve().relative_to(ROOT))


@functools.cache
def users() -> dict[tuple[str, str], tuple[str, ...]]:
    """(slot, component) -> variants whose presets have it where the plain Transformer has another one."""
    from hf_xformers.cli.descriptions import own_components

    found: dict[tuple[str, str], list[str]] = {}
    for name, cls in variants().items():
        for slot, spec in own_components(cls()):
            key = ("attention" if slot == "cross_attention" else slot, spec.type)
            if name not in found.setdefault(key, []):
                found[key].append(name)
    return {key: tuple(names) for key, names in found.items()}
