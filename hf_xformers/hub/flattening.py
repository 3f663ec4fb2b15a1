# SPDX-License-Identifier: Apache-2.0
"""Python files of a package as files of one folder, which import each other as `from .name import ...`.

transformers' loader of remote code copies a checkpoint's file and what it imports relatively, as far as it finds it:
it looks for lines `from .name import` and does not follow `from . import name`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path

from .joining import homes, may_join

PACKAGE = __package__.partition(".")[0]
_FUTURE = "from __future__ import annotations"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
# What the loader reads (transformers/dynamic_module_utils.py, get_relative_imports).
VISIBLE = re.compile(r"^\s*from\s+\.(\S+)\s+import", flags=re.MULTILINE)


class Flattener:
    """Collects modules and what they import, and writes them for one folder.

    substitutes: module name -> source that stands for it. names: names that the package's own `__init__` gives ->
    module that has them.
    """

    def __init__(self, substitutes: Mapping[str, str], names: Mapping[str, str]):
        self.names = names
        self.sources: dict[str, str] = {}
        self._substitutes = substitutes
        self._homes: dict[str, str] = {}

    def add(self, modules: Iterable[str]) -> None:
        """Adds modules and, step by step, everything that they import of the package, or that no receiver could
        install."""
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module in self.sources:
                continue
            source = self._substitutes.get(module)
            self.sources[module] = self._read(module) if source is None else source
            waiting += self._imported(module)

    def join(self, rooms: Iterable[str], alone: Iterable[str] = ()) -> None:
        """Lets the modules of each of these packages share files, but for those `alone`. A module that is imported
        itself, for its names to be read off it, keeps its own, and so does one with a substitute."""
        wanted = {f"{PACKAGE}.{room}": room for room in rooms}
        targets = {module: self._targets(module) for module in self.sources}
        apart = {name for found in targets.values() for name, itself in found if itself} | {*self._substitutes, *alone}
        imports = {module: {name for name, _ in found} - set(self._substitutes) for module, found in targets.items()}
        rooms_of = {
            module: wanted[room]
            for module, source in self.sources.items()
            if (room := ".".join(module.split(".")[:2])) in wanted and module not in apart
            if may_join(module, source)
        }
        self._homes = homes(self.sources, imports, rooms_of)

    def home(self, module: str) -> str:
        """The file, without suffix, that a module goes into."""
        return self._homes.get(module) or flat_name(module)

    def files(self) -> dict[str, str]:
        """File name -> source of every module, imports rewritten."""
        taken = {flat_name(module) for module in self.sources if module not in self._homes}
        single = [module for module in sorted(self.sources) if module not in self._homes]
        if len(taken) < len(single) or taken & set(self._homes.values()):
            names = [*map(flat_name, single), *set(self._homes.values())]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"Two modules become the file '{twice}.py'; rename one.")
        found = {f"{flat_name(module)}.py": self._rewritten(module) for module in single}
        for module, home in self._homes.items():
            name = f"{home}.py"
            text = self._rewritten(module).replace(f"{_FUTURE}\n", "", 1)
            found[name] = found.get(name, f"{_FUTURE}\n") + f"\n# {'-' * 20} {module}\n\n{text}"
        return dict(sorted(found.items()))

    def _statement(self, target: str, itself: bool, alias: ast.alias) -> str:
        home = self.home(target)
        if not itself:
            return f"from .{home} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        called = alias.asname or alias.name
        return f"from . import {home}" + ("" if home == called else f" as {called}")

    @staticmethod
    def _read(module: str) -> str:
        file = _file(module)
        if file is None:
            raise ValueError(
                f"The code of module {module!r} stands in no Python file of its own, so that it cannot go with the"
                " checkpoint; define components and variants in an importable file."
            )
        return file.read_text(encoding="utf-8").removeprefix(LICENCE)  # the files say it in a header of their own

    def _imports(self, module: str) -> list[tuple[ast.ImportFrom, str]]:
        return package_imports(module, self.sources[module])

    def _target(self, module: str, base: str, name: str) -> tuple[str, bool]:
        """What `from base import name` in a module reads: a module, and whether the name is that module itself."""
        if _file(f"{base}.{name}") is not None:
            return f"{base}.{name}", True
        if base == PACKAGE and name in self.names:
            return self.names[name], False
        if base == PACKAGE and module.partition(".")[0] != PACKAGE:
            raise ValueError(_kept_apart(module, f"from {PACKAGE} import {name}"))
        return base, False

    def _targets(self, module: str) -> list[tuple[str, bool]]:
        return [self._target(module, base, alias.name) for node, base in self._imports(module) for alias in node.names]

    def _imported(self, module: str) -> list[str]:
        return [target for target, _ in self._targets(module)]

    def _rewritten(self, module: str) -> str:
        lines = self.sources[module].encode().splitlines(keepends=True)  # the columns of `ast` count bytes
        nodes = sorted(self._imports(module), key=lambda entry: entry[0].lineno, reverse=True)
        for node, base in nodes:
            targets = [self._target(module, base, alias.name) for alias in node.names]
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            same = [module in self._homes and self.home(target) == self.home(module) for target, _ in targets]
            if not any(same) and all(target == (base, False) for target in targets):
                # the names, and comments among them, stay as they are
                text = b"".join([*lines[first:last], lines[last][: node.end_col_offset]])[node.col_offset :].decode()
                text = re.sub(r"^from\s+[.\w]+\s+import", f"from .{self.home(base)} import", text, count=1)
            else:
                statements = [
                    _in_same_file(alias) if here else self._statement(*target, alias)
                    for target, alias, here in zip(targets, node.names, same)
                ]
                nothing = "pass" if node.col_offset else ""  # a block may hold nothing else
                text = ("\n" + " " * node.col_offset).join(filter(None, statements)) or nothing
            lines[first : last + 1] = [before + text.encode() + after]
        return b"".join(lines).decode()


@functools.lru_cache(maxsize=512)
def package_imports(module: str, source: str) -> list[tuple[ast.ImportFrom, str]]:
    """The import statements of a module that concern files of the folder, with the absolute name of what they import
    from."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == PACKAGE:
                    raise ValueError(_kept_apart(module, f"import {alias.name}"))
                if _goes_along(module, alias.name):
                    raise ValueError(
                        f"{str(_file(module) or module)!r} has `import {alias.name}`, which the code of a checkpoint"
                        f" cannot; write `from {alias.name} import NAME` for each name that it needs."
                    )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            if node.level or _goes_along(module, base):
                found.append((node, base))
    return found


def _goes_along(module: str, name: str) -> bool:
    """Whether what a module imports by an absolute name goes with the checkpoint: the package, and of modules outside
    of it what belongs neither to Python nor to another installed distribution."""
    own, top = module.partition(".")[0], name.partition(".")[0]
    if top in (own, PACKAGE) or own == PACKAGE:
        return top in (own, PACKAGE)
    known = _distributions()
    others = set(known.get(top, ())) - set(known.get(own, ()))
    return not others and top not in sys.stdlib_module_names and _found(top) is not None


_distributions = functools.cache(packages_distributions)


def _kept_apart(module: str, statement: str) -> str:
    """Why a statement cannot go with a checkpoint."""
    return (
        f"{str(_file(module) or module)!r} has `{statement}`, which the code of a checkpoint cannot; keep the"
        f" component in a file that imports what it needs by name (`from {PACKAGE} import Spec, register`), and what"
        " makes models in another file."
    )


def unseen(files: Mapping[str, str], start: str) -> list[str]:
    """The files, by name without suffix, that the loader does not reach from `start`."""
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += VISIBLE.findall(files[f"{name}.py"])
    return sorted(name.removesuffix(".py") for name in files if name.removesuffix(".py") not in reached)


def flat_name(module: str) -> str:
    """`hf_xformers.attention.dense` -> `attention_dense`; a module of another package keeps its package's name."""
    return module.removeprefix(f"{PACKAGE}.").replace(".", "_")


def _in_same_file(alias: ast.alias) -> str:
    return f"{alias.asname} = {alias.name}" if alias.asname not in (None, alias.name) else ""


def _file(module: str) -> Path | None:
    """The file of a module; None for a package without `__init__`, for what is no module, and for `__main__`."""
    spec = _found(module)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _found(module: str) -> ModuleSpec | None:
    """Where Python finds a module; None for what is no module, and for `__main__`."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
