"""The start pages of `model_cards/` and `benchmarks/results/` in the checkout; `python -m scripts.docs.figures` writes
them."""

from __future__ import annotations

from hf_xformers.families import SURVEY, survey_number
from hf_xformers.hub.model_card import shapes

from . import catalog, results
from .markup import code, page, prose, table

SHORT = {"encoder": "E", "causal decoder": "D", "encoder-decoder": "S"}  # as `hf-xformers list` has them


def indexes() -> dict[str, str]:
    """Path from the root -> text."""
    return {"model_cards/README.md": cards(), "benchmarks/results/README.md": measured()}


def cards() -> str:
    parts = []
    for key, section in SURVEY.items():
        found = [name for name, cls in catalog.variants().items() if cls.info.section == key and name != "xformer"]
        if not found:
            continue
        rows = [_card(name) for name in found]
        number = survey_number(key)
        parts += [f"## {number} {section.title}" if number else f"## {section.title}", table(rows)]
    objectives = ", ".join(f"[{name}](objectives/{name}.md)" for name in catalog.objectives())
    return page(
        "All variants",
        "In the order of [A Survey of Transformers](https://arxiv.org/abs/2106.04554) (Lin et al. 2022); each page has"
        " equation, attention map, cost, settings, measured results and the paper. E: encoder, D: causal decoder, S:"
        " encoder-decoder. `hf-xformers list` prints the same, `hf-xformers list NAME` one of them, and a word that is"
        " no name is searched for.",
        *parts,
        "## Pretraining objectives",
        f"{objectives}.",
    )


def _card(name: str) -> dict[str, str]:
    cls = catalog.variants()[name]
    forms = "".join(letter for form, letter in SHORT.items() if form in shapes(cls))
    return {
        "variant": f"[{catalog.variant_title(name)}](xf_{name}.md)",
        "what it changes": prose(cls.info.summary),
        "as": forms,
        "name": code(name),
    }


def measured() -> str:
    rows = []
    for name, content in results.files().items():
        machine = content.get("machine", {})
        rows.append(
            {
                "what": f"[{results.said(name)[0]}]({name}.md)",
                "rows": sum(map(len, results.tables_of(name).values())),
                "measured on": "one CPU core" if machine.get("threads") == 1 else machine.get("device", ""),
            }
        )
    return page(
        "Results",
        "Everything that was measured, as the programs of `benchmarks/` wrote it: JSON for programs, a page of tables"
        " next to it. Ratios carry over to other machines better than times; a result is next to its baseline or its"
        " dense counterpart. [What the figures of a GPU show](../../docs/gpu.md), in two sentences.",
        table(rows),
    )
