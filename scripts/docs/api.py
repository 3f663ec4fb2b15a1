"""The API reference: tables of fields, and the docstrings of the names that are public, which mkdocstrings shows."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable

from hf_xformers.configuration_image import XFormerImageConfig
from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.core.pretraining_specs import PRETRAINING
from hf_xformers.modeling.head_classes import CLASSES

from . import catalog
from .fields import config_fields, spec_fields
from .markup import Pages, code, link, page, table

# Page -> (what it says first, modules whose public names it shows: `__all__`, or the names behind the module).
ROOMS: dict[str, tuple[str, str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "conversion": (
        "Conversion and swaps",
        "Checkpoints of transformers' families in this package's layout and back, and other components in a trained"
        " model. On the command line: `hf-xformers convert`, `uptrain`, `linearize`.",
        (("hf_xformers.conversion", ()),),
    ),
    "training": (
        "Training",
        "Pretraining, continued training, linearization and what they are built of. On the command line:"
        " `hf-xformers pretrain`, `uptrain`, `linearize`, `search`.",
        (("hf_xformers.training", ()),),
    ),
    "finetuning": (
        "Fine-tuning and adapters",
        "Tasks, their data, models with a new head, adapters. On the command line: `hf-xformers finetune`, `predict`,"
        " `features`.",
        (("hf_xformers.finetuning", ()), ("hf_xformers.adapters", ())),
    ),
    "compression": (
        "Compression and export",
        "Trained models made smaller or faster. On the command line: `hf-xformers prune`, `distill`, `quantize`,"
        " `export`.",
        (
            ("hf_xformers.compression", ()),
            ("hf_xformers.export", ("export_onnx", "export_step", "export_step_onnx")),
        ),
    ),
    "hub": (
        "Hub",
        "Cards, and checkpoints that carry their code. On the command line: `hf-xformers push`, `bundle`, `card`.",
        (("hf_xformers.hub", ()), ("hf_xformers.hub.push", ("push",))),
    ),
    "benchmark": (
        "Benchmark",
        "Time, memory and quality compared with dense attention. On the command line: `hf-xformers benchmark`.",
        (
            ("hf_xformers.benchmark.runner", ()),
            ("hf_xformers.benchmark.entries", ()),
            ("hf_xformers.benchmark.steps", ()),
            ("hf_xformers.benchmark.measure", ()),
            ("hf_xformers.benchmark.tasks", ()),
        ),
    ),
    "data": ("Data", "Text in, rows of tokens out.", (("hf_xformers.data", ()),)),
}


def pages() -> Pages:
    made = {
        "api/index.md": overview(),
        "api/configs.md": configs(),
        "api/models.md": models(),
        "api/objectives.md": objectives(),
        "api/components.md": components(),
    }
    for name, (title, about, modules) in ROOMS.items():
        shown = [entry for module, names in modules for entry in _public(module, names)]
        made[f"api/{name}.md"] = page(title, about, *shown)
    return made


def overview() -> str:
    here = "api/index.md"
    rows = [
        {"page": link("Configurations", here, "api/configs.md"), "what it explains": "every field of a config"},
        {"page": link("Models", here, "api/models.md"), "what it explains": "the classes of a family, by head"},
        {
            "page": link("Components", here, "api/components.md"),
            "what it explains": "specs, slots, a part of your own",
        },
        {
            "page": link("Objectives", here, "api/objectives.md"),
            "what it explains": "what models are trained to predict",
        },
    ]
    rows += [
        {"page": link(title, here, f"api/{name}.md"), "what it explains": about.partition(". On the")[0].rstrip(".")}
        for name, (title, about, _) in ROOMS.items()
    ]
    return page("API reference", "Made from the docstrings of the code.", table(rows))


def configs() -> str:
    here = "api/configs.md"
    slots = table(
        {
            "slot": code(slot),
            "default": code(getattr(XFormerConfig(), slot).type),
            "components": link(f"{len(catalog.components(slot))} of them", here, catalog.component_page(slot)),
        }
        for slot in catalog.SLOT_NAMES
    )
    own = {
        name: cls for name, cls in catalog.variants().items() if config_fields(cls, _added(cls)) and name != "xformer"
    }
    added = [
        part
        for name, cls in own.items()
        for part in (
            f"### {cls.__name__}",
            "Of " + link(catalog.variant_title(name), here, catalog.variant_page(name)) + ":",
            config_fields(cls, _added(cls)),
        )
    ]
    return page(
        "Configurations",
        "A config has the geometry of a Transformer under the names that transformers uses, and one component for each"
        " slot. Every variant's config is an `XFormerConfig` with defaults of its own.",
        "## Slots",
        "`cross_attention` takes the components of `attention`.",
        slots,
        "## Fields",
        config_fields(XFormerConfig),
        "## Settings of pretraining",
        "What `pretraining` holds, by name. A config stores those that its variant has decided, and those that differ"
        " from these defaults; the objectives of `hf-xformers pretrain` set them.",
        *(
            part
            for name in PRETRAINING
            for part in (f"### {code(name)}", f"{PRETRAINING.get(name).summary}:", spec_fields(PRETRAINING.get(name)))
        ),
        "## Fields of models that read images",
        config_fields(XFormerImageConfig, _added(XFormerImageConfig)),
        "## Fields that variants add",
        *added,
        "## The class",
        "::: hf_xformers.configuration_xformer.XFormerConfig",
    )


def _added(cls: type) -> list[str]:
    """The fields of a config that the general one has not."""
    general = {field.name for field in dataclasses.fields(XFormerConfig)}
    if issubclass(cls, XFormerImageConfig) and cls is not XFormerImageConfig:
        general |= {field.name for field in dataclasses.fields(XFormerImageConfig)}
    return [field.name for field in dataclasses.fields(cls) if field.name not in general]


def models() -> str:
    here = "api/models.md"
    heads = table(
        {"head": code(head), "what it is": (cls.__doc__ or "").strip().split("\n")[0]} for head, cls in CLASSES.items()
    )
    families = table(
        {
            "variant": link(catalog.variant_title(name), here, catalog.variant_page(name)),
            "classes": f"{code(cls.__name__.removesuffix('Config'))} + " + ", ".join(map(code, cls.heads)),
        }
        for name, cls in catalog.variants().items()
    )
    return page(
        "Models",
        "Every variant is a family of classes: its prefix and a head, as `XFPerformerForMaskedLM`. Import them from"
        " `hf_xformers`, or use transformers' Auto classes, which know them all. The classes below are those of the"
        " free mix; a family's behave alike with its own config.",
        "## Heads",
        heads,
        "## Families",
        families,
        "::: hf_xformers.modeling_xformer.XFormerModel",
        *(f"::: {cls.__module__}.{cls.__name__}" for head, cls in CLASSES.items() if head != "Model"),
        "::: hf_xformers.families.make_family",
        "::: hf_xformers.families.VariantInfo",
    )


def components() -> str:
    here = "api/components.md"
    return page(
        "Components",
        "A component is described by a spec: a small dataclass in the file of the module that it builds."
        " Fields of all are on the pages of the slots: "
        + ", ".join(link(slot, here, catalog.component_page(slot)) for slot in catalog.SLOT_NAMES)
        + ".",
        *(
            f"::: hf_xformers.{name}"
            for name in (
                "core.components.Spec",
                "core.components.register",
                "core.components.build_spec",
                "core.components.names",
                "core.specs.aliased",
                "core.bounds.bounded",
                "core.call.Call",
                "attention.shared.spec.AttentionSpec",
                "attention.shared.base.Attention",
                "position.base.PositionSpec",
                "position.base.Position",
                "position.base.ScoreBias",
                "feedforward.base.FeedForwardSpec",
                "blocks.base.BlockSpec",
                "stacks.base.StackSpec",
                "stacks.base.Stack",
                "heads.base.HeadSpec",
            )
            if _exists(f"hf_xformers.{name}")
        ),
    )


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def objectives() -> str:
    here = "api/objectives.md"
    parts: list[str] = []
    for name, cls in catalog.objectives().items():
        parts += [
            f"## {name}",
            f"`{cls.__module__}.{cls.__name__}`: {link(cls.summary or name, here, catalog.objective_page(name))}.",
            spec_fields(cls),
        ]
    return page(
        "Objectives",
        "An objective is a frozen dataclass, its fields the settings of the paper. It makes a data collator.",
        "::: hf_xformers.objectives.base.Objective",
        "::: hf_xformers.objectives.base.build_objective",
        "::: hf_xformers.objectives.base.Collator",
        *parts,
    )


def _public(module: str, names: tuple[str, ...]) -> list[str]:
    """mkdocstrings' marks for the public names of a module: functions and classes, where they are defined."""
    room = importlib.import_module(module)
    public: Iterable[str] = (
        names
        or getattr(room, "__all__", None)
        or [
            name
            for name, value in vars(room).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module
        ]
    )
    found = []
    for name in sorted(public):
        value = getattr(room, name)
        where = getattr(value, "__module__", "")
        if callable(value) and where.startswith("hf_xformers") and getattr(value, "__doc__", None):
            found.append(f"::: {where}.{value.__qualname__}")
    return list(dict.fromkeys(found))
