"""Python files of a package as files of one folder, which import each other as `from .name import ...`.

transformers' loader of remote code copies a checkpoint's file and what it imports relatively, as far as it finds it:
it looks for lines `from .name import` and does not follow `from . import name`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = __package__.partition(".")[0]
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

    def add(self, modules: Iterable[str]) -> None:
        """Adds modules and, step by step, everything of the package that they import."""
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module in self.sources:
                continue
            source = self._substitutes.get(module)
            self.sources[module] = self._read(module) if source is None else source
            waiting += self._imported(module)

    def files(self) -> dict[str, str]:
        """File name -> source of every module, imports rewritten."""
        found: dict[str, str] = {}
        for module in sorted(self.sources):
            name = f"{flat_name(module)}.py"
            if name in found:
                raise ValueError(f"Two modules become the file {name!r}, one of them {module!r}; rename it.")
            found[name] = self._rewritten(module)
        return found

    @staticmethod
    def _read(module: str) -> str:
        file = _file(module)
        if file is None:
            raise ValueError(
                f"The code of module {module!r} stands in no Python file of its own, so that it cannot go with the"
                " checkpoint; define components and variants in an importable file."
            )
        return file.read_text(encoding="utf-8")

    def _imports(self, module: str) -> list[tuple[ast.ImportFrom, str]]:
        return package_imports(module, self.sources[module])

    def _target(self, base: str, name: str) -> tuple[str, bool]:
        """The module that `from base import name` reads, and whether the name is that module itself."""
        if _file(f"{base}.{name}") is not None:
            return f"{base}.{name}", True
        if base == PACKAGE and name in self.names:
            return self.names[name], False
        return base, False

    def _imported(self, module: str) -> list[str]:
        return [self._target(base, alias.name)[0] for node, base in self._imports(module) for alias in node.names]

    def _rewritten(self, module: str) -> str:
        lines = self.sources[module].encode().splitlines(keepends=True)  # the columns of `ast` count bytes
        nodes = sorted(self._imports(module), key=lambda entry: entry[0].lineno, reverse=True)
        for node, base in nodes:
            targets = [self._target(base, alias.name) for alias in node.names]
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            if all(
                target == (base, False) for target in targets
            ):  # the names, and comments among them, stay as they are
                text = b"".join([*lines[first:last], lines[last][: node.end_col_offset]])[node.col_offset :].decode()
                text = re.sub(r"^from\s+[.\w]+\s+import", f"from .{flat_name(base)} import", text, count=1)
            else:
                text = ("\n" + " " * node.col_offset).join(
                    _statement(*target, alias) for target, alias in zip(targets, node.names)
                )
            lines[first : last + 1] = [before + text.encode() + after]
        return b"".join(lines).decode()


@functools.lru_cache(maxsize=512)
def package_imports(module: str, source: str) -> list[tuple[ast.ImportFrom, str]]:
    """The import statements of a module that concern the package, with the absolute name of what they import from."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == PACKAGE:
                    raise ValueError(
                        f"{module} has `import {alias.name}`, which a checkpoint's code cannot; write `from"
                        f" {alias.name} import ...` with the names that it uses."
                    )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            if node.level or base.partition(".")[0] == PACKAGE:
                found.append((node, base))
    return found


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


def _statement(target: str, itself: bool, alias: ast.alias) -> str:
    if not itself:
        return f"from .{flat_name(target)} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    called = alias.asname or alias.name
    flat = flat_name(target)
    return f"from . import {flat}" + ("" if flat == called else f" as {called}")


def _file(module: str) -> Path | None:
    """The file of a module; None for a package without `__init__`, for what is no module, and for `__main__`."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
