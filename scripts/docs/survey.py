"""The survey's tree of systems, from `survey.toml`, and what of this package stands for each of them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("survey.toml")


@dataclass(frozen=True)
class System:
    """A system of the literature.

    name: as the literature calls it; also: further names. at: where its page is, `variant`, `slot.component`,
    `objective.NAME` or a path `folder/page.md`; empty: it has none and is a name only. what: what it does, for names
    only. parts: of this package, as `at`, that express it.
    """

    name: str
    at: str = ""
    also: tuple[str, ...] = ()
    what: str = ""
    parts: tuple[str, ...] = field(default=())


@dataclass
class Branch:
    """A heading of the tree with its systems and further headings below it."""

    title: str
    systems: list[System] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)

    def walk(self) -> Iterator[System]:
        yield from self.systems
        for branch in self.branches.values():
            yield from branch.walk()


@functools.cache
def tree() -> Branch:
    """The whole tree. Raises ValueError for an entry that says neither where it is nor what it does."""
    root = Branch("")
    for group in tomllib.loads(FILE.read_text(encoding="utf-8"))["group"]:
        branch = root
        for title in group["path"]:
            branch = branch.branches.setdefault(title, Branch(title))
        for entry in group["systems"]:
            entry = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
            system = System(**entry)
            if not system.at and not (system.what and system.parts):
                raise ValueError(f"{FILE.name}: {system.name!r} needs `at`, or `what` and `parts`.")
            branch.systems.append(system)
    return root


@functools.cache
def titles() -> dict[str, str]:
    """What the tree calls a place: the first name of each."""
    found: dict[str, str] = {}
    for system in tree().walk():
        if system.at:
            found.setdefault(system.at, system.name)
    return found


def names_only() -> list[tuple[str, System]]:
    """(topmost heading, system) of all that are names only, in the order of the tree."""
    return [(branch.title, system) for branch in tree().branches.values() for system in branch.walk() if not system.at]
