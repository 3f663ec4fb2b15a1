"""The site's configuration: `mkdocs.yml` with its navigation filled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from . import catalog
from .markup import ROOT

Entry = Any  # a path, or {title: path or list of entries}


def configuration(pages: Iterable[str]) -> str:
    """`mkdocs.yml` for these pages: entries of the navigation whose page is not there are left out, and an entry
    `FOLDER/*` stands for what `_filled` says of that folder.

    Raises:
        ValueError: a page that the navigation does not lead to.
    """
    content = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    known = set(pages)
    content["nav"] = _present(content["nav"], known)
    content["docs_dir"], content["site_dir"] = "pages", "site"
    content["plugins"] = _absolute(content["plugins"])
    lost = known - set(_paths(content["nav"]))
    if lost:
        raise ValueError(f"the navigation of mkdocs.yml does not lead to {min(lost)} ({len(lost)} such pages)")
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=119)


def _absolute(plugins: list[Any]) -> list[Any]:
    """The package is read where it stands, wherever the site is built."""
    for plugin in plugins:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            python = plugin["mkdocstrings"]["handlers"]["python"]
            python["paths"] = [str(ROOT)]
            python["options"]["extensions"] = [str(ROOT / entry) for entry in python["options"]["extensions"]]
    return plugins


def _present(entries: list[Entry], known: set[str]) -> list[Entry]:
    kept: list[Entry] = []
    for entry in entries:
        if isinstance(entry, str):
            kept += _present(_filled(entry), known) if entry.endswith("*") else [entry] if entry in known else []
            continue
        ((title, below),) = entry.items()
        if isinstance(below, list):
            below = _present(below, known)
            kept += [{title: below}] if below else []
        elif below in known:
            kept.append(entry)
    return kept


def _filled(entry: str) -> list[Entry]:
    """The generated pages that an entry stands for."""
    if entry == "zoo/*":
        return [
            {
                catalog.section_title(section): [
                    {catalog.variant_title(name): catalog.variant_page(name)} for name in names
                ]
            }
            for section, names in catalog.by_section().items()
        ]
    if entry == "zoo/components/*":
        return [{slot.capitalize(): catalog.component_page(slot)} for slot in catalog.SLOT_NAMES]
    if entry == "objectives/*":
        return [{name: catalog.objective_page(name)} for name in catalog.objectives()]
    if entry == "results/*":
        from . import results

        return [{name.replace("_", " ").capitalize(): results.page_of(name)} for name in results.files()]
    raise ValueError(f"mkdocs.yml: nothing is known to fill {entry!r} with")


def _paths(entries: list[Entry]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        below = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += [below] if isinstance(below, str) else _paths(below)
    return found
