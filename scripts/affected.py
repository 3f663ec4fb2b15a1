#!/usr/bin/env python
"""Finds the tests that a change can reach, nearest first, and runs them.

    python scripts/affected.py --list             what differs from where this branch left main, and the tests for it
    python scripts/affected.py HEAD~3 -n 2        runs those for what differs from HEAD~3; further words go to pytest

Without a revision, files are compared with where the branch left main; on main itself with the last commit or, when
nothing is uncommitted, with the one before. Uncommitted and new files always count.

A test file is reached when its imports lead to a changed file (grimp reads those of the package), when it names a
changed component in quotes, or when it changed itself. The contract suite (tests/common) is run for the families
that are built of what changed. Both are cut at a number of files and families, the nearest first, so that a run takes
less than three minutes on two cores; the output says what was left out, and tests marked slow always are.
`scripts/test.sh` runs everything.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_xformers"
FILES, FAMILIES = 10, 6  # what less than three minutes on two cores are enough for
FAR = 99
COMMON = "tests/common"

sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def starting_point() -> str:
    """The revision to compare with when none is given."""
    for main in ("origin/main", "main"):
        try:
            base = git("merge-base", "HEAD", main)
        except ValueError:
            continue
        if base != git("rev-parse", "HEAD"):
            return base
    return "HEAD" if git("status", "--porcelain") else "HEAD~"


def changed_files(revision: str) -> list[str]:
    """Paths from the root of the repository: what differs from `revision`, and files that git does not know yet."""
    differing = git("diff", "--name-only", revision, "--").splitlines()
    return sorted({*differing, *git("ls-files", "--others", "--exclude-standard").splitlines()})


def module_of(path: str) -> str:
    """`hf_xformers/core/cache.py` -> `hf_xformers.core.cache`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: Path) -> set[str]:
    """Dotted names that a test file imports, each also with what is taken from it: the name of a module, perhaps."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found - {PACKAGE, "tests"}  # the package as a whole is what every test uses


def distances(start: Iterable[str], importers: Mapping[str, set[str]]) -> dict[str, int]:
    """How many imports lead from each module to one of `start`."""
    found = dict.fromkeys(start, 0)
    queue = list(found)
    for module in queue:
        for importer in sorted(importers.get(module, ())):
            if importer not in found:
                found[importer] = found[module] + 1
                queue.append(importer)
    return found


@dataclass
class Plan:
    """files: test files, nearest first; families: those that the contract suite is run for; left_out: how many files
    and families were reached as well."""

    files: list[str] = field(default_factory=list)
    families: list[str] = field(default_factory=list)
    left_out: tuple[int, int] = (0, 0)

    def describe(self) -> str:
        lines = [f"{len(self.files)} test files:" if self.files else "no test files", *map("  {}".format, self.files)]
        if self.families:
            lines.append(f"the contract suite, {COMMON}, for {', '.join(self.families)}")
        if any(self.left_out):
            lines.append(
                f"left out, further from the change: {self.left_out[0]} files, {self.left_out[1]} families;"
                " scripts/test.sh runs everything"
            )
        return "\n".join(lines)


@functools.cache
def import_graph() -> tuple[dict[str, set[str]], dict[str, Path]]:
    """(importers of each module, path of each test module)."""
    import grimp

    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    importers = {name: set(graph.find_modules_that_directly_import(name)) for name in graph.modules}
    tests = {module_of(str(path.relative_to(ROOT))): path for path in sorted((ROOT / "tests").rglob("*.py"))}
    for name, path in tests.items():
        for imported in imported_names(path):
            importers.setdefault(imported, set()).add(name)
    return importers, tests


def component_names(modules: set[str]) -> set[str]:
    """Names under which `modules` register components."""
    from hf_xformers.core.components import SLOTS

    return {name for slot in SLOTS.values() for name in slot if slot.get(name).__module__ in modules}


@functools.cache
def family_modules() -> dict[str, set[str]]:
    """Family -> the modules of its config and of all its components."""
    from hf_xformers.core.components import SLOTS
    from hf_xformers.variants import config_class, model_types

    found = {}
    for name in model_types():
        config = config_class(name)()
        layers = []
        for tower in config.tower_configs():
            layers += list(tower.per_layer_config) if tower.is_heterogeneous else [tower]
        specs = {type(getattr(layer, slot)) for layer in layers for slot in SLOTS}
        found[name] = {kind.__module__ for kind in (type(config), *specs)}
    return found


@functools.cache
def covered_families() -> set[str]:
    """The families that the contract's cover of components is made of; of the others it has a smoke test alone."""
    from tests.common.cases import PARTS

    return {case.name for case in PARTS}


def nearest(distance: Mapping[str, int], limit: int, first: Iterable[str] = ()) -> list[str]:
    """The `limit` nearest; among equally near ones, those in `first`."""
    preferred = set(first)
    return sorted(distance, key=lambda name: (distance[name], name not in preferred, name))[:limit]


def make_plan(changed: list[str]) -> Plan:
    """What to run for these files."""
    from conformance import SAMPLE  # one family for each engine and kind of stack

    importers, tests = import_graph()
    python = {module_of(path) for path in changed if path.endswith(".py")}
    reach = distances(python, importers)
    own = {name for name in python if name.startswith(f"{PACKAGE}.")}
    quoted = [re.compile(rf"""["']{re.escape(name)}["']""") for name in component_names(own)] if own else []
    namesakes = {f"test_{name.rpartition('.')[2]}" for name in own}
    files: dict[str, int] = {}
    for name, path in tests.items():
        if not path.name.startswith("test_"):
            continue
        text = path.read_text(encoding="utf-8")
        distance = 0 if path.stem in namesakes else FAR
        distance = min(distance, reach.get(name, FAR), 2 if any(pattern.search(text) for pattern in quoted) else FAR)
        # A file that is read and not imported: a card, a script, the guide.
        if any(not entry.endswith(".py") and Path(entry).name in text for entry in changed):
            distance = min(distance, 1)
        where = str(path.relative_to(ROOT))
        if distance < FAR and (where in changed or not where.startswith(COMMON)):
            files[where] = distance
    common = [path for path in changed if path.startswith((COMMON, "tests/helpers"))]
    families = {}
    if own or common:
        for name, modules in family_modules().items():
            near = min(reach.get(module, FAR) for module in modules)
            if near < FAR or common:
                families[name] = near + (0 if name in covered_families() else 0.5)  # behind those as near
    chosen, others = nearest(files, FILES), nearest(families, FAMILIES, SAMPLE)
    return Plan(chosen, others, (len(files) - len(chosen), len(families) - len(others)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] [--list] [REVISION] [WORD ...]",
        description=__doc__.split("\n\n")[0],
        epilog="Further words, from the first that begins with a hyphen on, go to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="only say what would run")
    options, words = parser.parse_known_args(argv)
    # A positional argument would take the 2 of `-n 2`, which argparse does not know to belong together.
    revision = words.pop(0) if words and not words[0].startswith("-") else None
    try:
        changed = changed_files(revision or starting_point())
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(changed)} files differ")
    plan = make_plan(changed)
    print(plan.describe(), flush=True)
    if options.list:
        return 0
    pytest = [sys.executable, "-m", "pytest", "-m", "not slow", *words]
    codes = []
    if plan.files:
        codes.append(subprocess.call([*pytest, *plan.files], cwd=ROOT))
    if plan.families:
        codes.append(subprocess.call([*pytest, COMMON, "-k", contract_expression(plan.families)], cwd=ROOT))
    return next((code for code in codes if code not in (0, 5)), 0)  # 5: all of a file's tests are slow


def contract_expression(families: list[str]) -> str:
    """pytest's expression for the contract of these families: a test's name is in it as `[xf_bert-encoder]`."""
    return " or ".join(f"{start}{name}-" for name in families for start in ("[", "-"))


if __name__ == "__main__":
    sys.exit(main())
