# SPDX-License-Identifier: Apache-2.0
"""Which modules of a package may stand in one file: those of a package, where no name means two things."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterable, Iterator, Mapping

_LOGGER = "logging.get_logger(__name__)"  # of whichever file


def homes(sources: Mapping[str, str], imports: Mapping[str, set[str]], rooms: Mapping[str, str]) -> dict[str, str]:
    """Module -> the file (without suffix) that it goes into, in an order in which every module follows those that it
    imports.

    A package's modules become one file, `room`; where two bind a name to different things, the later one begins
    another, `room_2`. A file then imports itself or earlier ones alone, as the modules and the packages do.

    sources: module -> code. imports: module -> modules that it imports. `rooms`: module -> its package, of those that
    may be joined; the caller names the others.
    """
    found: dict[str, str] = {}
    files: dict[str, list[dict[str, object]]] = {}
    reach: dict[str, dict[str, int]] = {}  # module -> the last file of each package that it imports, by any road
    for module in _in_order(imports):
        reach[module] = {}
        for other in imports[module]:
            for room, index in reach.get(other, {}).items():
                back = rooms.get(module) == room != rooms.get(other)  # through a file outside of the package
                reach[module][room] = max(reach[module].get(room, 0), index + back)
        if module not in rooms:
            continue
        room, names = rooms[module], _bindings(module, sources[module])
        begun, index = files.setdefault(room, []), reach[module].get(room, 0)
        while index < len(begun) and any(begun[index].get(name, what) != what for name, what in names.items()):
            index += 1
        if index == len(begun):
            begun.append({})
        begun[index].update(names)
        reach[module][room] = index
        found[module] = room if index == 0 else f"{room}_{index + 1}"
    return found


def may_join(module: str, source: str) -> bool:
    """Whether a module can share a file: it hides no name of Python's own from the others."""
    return not set(_bindings(module, source)) & set(dir(builtins))


def _in_order(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Modules behind those that they import."""
    done: set[str] = set()

    def visit(module: str) -> Iterator[str]:
        if module not in done and module in imports:
            done.add(module)
            for other in sorted(imports[module]):
                yield from visit(other)
            yield module

    for module in sorted(imports):
        yield from visit(module)


@functools.lru_cache(maxsize=512)
def _bindings(module: str, source: str) -> Mapping[str, object]:
    """What each name at the top of a module means: where it is imported from, or that this module defines it."""
    found: dict[str, object] = {}
    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = (module, node.name)
        else:
            logger = isinstance(node, ast.Assign) and ast.unparse(node.value) == _LOGGER
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found[part.id] = _LOGGER if logger else (module, part.id)
    return {name: what for name, what in found.items() if name != "__all__" and what != ("__future__", name)}


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, those inside of `if` and `try` too."""
    for node in body:
        inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
        handlers = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.ExceptHandler)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or not (inner or handlers):
            yield node
            continue
        yield from _statements(inner)
        for handler in handlers:
            yield from _statements(handler.body)
