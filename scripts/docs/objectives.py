"""The objectives' pages: what each predicts and needs, its settings, an example, who can be trained with it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from hf_xformers.objectives.description import needs
from hf_xformers.training.building import objectives_for

from . import catalog, results
from .markup import ROOT, Pages, code, link, page, prose, source_link, table

CARDS = ROOT / "model_cards" / "objectives"


def pages() -> Pages:
    made = {catalog.objective_page(name): objective(name, cls) for name, cls in catalog.objectives().items()}
    made["objectives/index.md"] = overview()
    return made


def overview() -> str:
    here = "objectives/index.md"
    rows = [
        {
            "objective": link(name, here, catalog.objective_page(name)),
            "predicts": prose(cls.summary),
            "trains": {"seq2seq": "encoder-decoder"}.get(cls.shape, cls.shape),
        }
        for name, cls in catalog.objectives().items()
    ]
    return page(
        "Pretraining objectives",
        "What a model is trained to predict. `--objective NAME` of `hf-xformers pretrain` chooses one,"
        " `--objective.FIELD VALUE` changes a setting.",
        table(rows),
    )


@functools.cache
def trained_by(variant: str) -> frozenset[str]:
    """The objectives that a variant has what it needs for."""
    return frozenset(objectives_for(catalog.variants()[variant]))


def objective(name: str, cls: Any) -> str:
    here = catalog.objective_page(name)
    body = _card_sections(name)
    fitting = [variant for variant in catalog.variants() if name in trained_by(variant)]
    also = [alias for alias, known in cls.registry._aliases.items() if known == name]
    facts = {
        "Predicts": prose(cls.summary),
        "Corrupts": prose(cls.corrupts),
        "Needs": prose(needs(cls)),
        "Also called": ", ".join(map(code, also)),
        "Source": source_link(catalog.file_of(cls)),
    }
    about = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    links = ", ".join(link(catalog.variant_title(variant), here, catalog.variant_page(variant)) for variant in fitting)
    return page(
        f"Objective {name}",
        "\n".join(f"- **{key}:** {value}" for key, value in facts.items() if value),
        prose(about),
        *(f"## {title}\n\n{text}" for title, text in body.items()),
        *results.measured_objective(name, here),
        "## Variants",
        f"{len(fitting)} of {len(catalog.variants())} have what it needs:",
        f'??? note "All {len(fitting)}"\n\n    {links}' if len(fitting) > 12 else links,
        description=cls.summary,
    )


def _card_sections(name: str) -> dict[str, str]:
    """The sections of an objective's card: settings, example, use. A test of the cards keeps them current."""
    text = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2])}
