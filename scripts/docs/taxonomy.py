"""The survey's tree of systems as a page that opens and closes, and the systems that are names only."""

from __future__ import annotations

from hf_xformers.families import SURVEY

from . import catalog, survey
from .markup import Pages, link, page, prose, table

INDEX, NAMES = "zoo/index.md", "zoo/names.md"
# Section of the survey -> the heading under which its variants stand that the tree does not name.
_HEADING = {
    "attention": "Attention",
    "position": "Positions",
    "normalization": "Normalization",
    "feedforward": "Feed-forward",
    "architecture": "Architecture",
    "training": "Pretrained models",
}


def pages() -> Pages:
    return {INDEX: taxonomy(), NAMES: names()}


def taxonomy() -> str:
    tree = whole_tree()
    parts = [
        "The systems of [A Survey of Transformers](https://arxiv.org/abs/2106.04554) (Lin et al. 2022), in its order."
        " Type a name, or open a branch.",
        '<div class="finder"><label for="find-system">Find a system</label> <input id="find-system" type="search"'
        ' placeholder="Luna, routing, RoPE, ViT ..." autocomplete="off"><p id="find-count" role="status"></p></div>',
        '<div class="taxonomy" markdown="1">',
        *(line for branch in tree.branches.values() for line in _branch(branch, 0)),
        "</div>",
        "## Parts by slot",
        "Every component, also those that no system above is named after: "
        + ", ".join(link(slot, INDEX, catalog.component_page(slot)) for slot in catalog.SLOT_NAMES)
        + ". Every objective: "
        + ", ".join(link(name, INDEX, catalog.objective_page(name)) for name in catalog.objectives())
        + ".",
    ]
    return page("The zoo", *parts, description="Every system of A Survey of Transformers, by its place in the survey")


def whole_tree() -> survey.Branch:
    """The survey's tree with the variants that it does not name under the headings of their sections."""
    root = _copy(survey.tree())
    named = {system.at for system in root.walk()}
    for name, cls in catalog.variants().items():
        if name not in named:
            section = SURVEY[cls.info.section]
            branch = root.branches[_HEADING[section.changes]]
            if branch.branches:
                branch = branch.branches.setdefault(section.title, survey.Branch(section.title))
            branch.systems.append(survey.System(catalog.variant_title(name), at=name))
    return root


def _copy(branch: survey.Branch) -> survey.Branch:
    return survey.Branch(
        branch.title, list(branch.systems), {title: _copy(below) for title, below in branch.branches.items()}
    )


def _branch(branch: survey.Branch, depth: int) -> list[str]:
    count = sum(1 for _ in branch.walk())
    lines = [
        f'<details markdown="1"{" open" if depth == 0 and branch.branches and branch.title == "Attention" else ""}>',
        f'<summary>{branch.title} <span class="count">{count}</span></summary>',
    ]
    if branch.systems:
        lines.append("\n".join(f"- {_system(system)}" for system in branch.systems))
    for below in branch.branches.values():
        lines += _branch(below, depth + 1)
    return [*lines, "</details>"]


def _system(system: survey.System) -> str:
    also = f' <span class="also">{", ".join(system.also)}</span>' if system.also else ""
    place = catalog.place(system.at) if system.at else None
    if place is not None:
        about = f": {prose(place.summary)}" if place.summary else ""
        return f"{link(system.name, INDEX, place.page)}{also}{about}"
    if system.at:
        return f"{system.name}{also}"
    return f"{system.name}{also} (name only): {prose(system.what)}; see {_parts(system, INDEX)}"


def _parts(system: survey.System, source: str) -> str:
    found = [catalog.place(part) for part in system.parts]
    links = [link(place.title, source, place.page) for place in found if place is not None]
    return ", ".join(links) or "the guides"


def names() -> str:
    parts = [
        "Systems that the surveys name and that are not here as variants of their own: what each does, in a line, and"
        " the parts of this package that it could be built from. Where a part is missing, the line says so.",
    ]
    found = survey.names_only()
    for heading in dict.fromkeys(heading for heading, _ in found):
        rows = [
            {
                "system": system.name + (f" ({', '.join(system.also)})" if system.also else ""),
                "what it does": prose(system.what),
                "with": _parts(system, NAMES),
            }
            for group, system in found
            if group == heading
        ]
        parts += [f"## {heading}", table(rows)]
    return page("Systems that are names only", *parts)
