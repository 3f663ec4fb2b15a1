# SPDX-License-Identifier: Apache-2.0
"""Tables of entities: types, and the names of each."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path

EMBEDDED = "stdlib"


def read_table(source: str) -> dict[str, list[str]]:
    """Type -> its names, of a JSON file, or of Python's own names ("stdlib"). A name of several types is left out.

    Raises ValueError for a file that is no such table, and for a type with fewer than two names, which could not be
    replaced by each other.
    """
    table = python_names() if source == EMBEDDED else _read(source)
    owners: dict[str, set[str]] = {}
    for kind, names in table.items():
        for name in names:
            owners.setdefault(name, set()).add(kind)
    clear = {kind: [n for n in dict.fromkeys(names) if len(owners[n]) == 1] for kind, names in table.items()}
    for kind, names in clear.items():
        if len(names) < 2:
            raise ValueError(
                f"entity_table={source!r}: type {kind!r} has {len(names)} names of its own, and a name is replaced by"
                " another of its type; give it at least 2, or leave the type out"
            )
    return clear


def _read(source: str) -> dict[str, list[str]]:
    try:
        table = json.loads(Path(source).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"entity_table={source!r} cannot be read ({error.strerror}); give a JSON file, or {EMBEDDED!r}"
        ) from error
    except ValueError as error:
        raise ValueError(f"entity_table={source!r} is no JSON ({error})") from error
    fits = isinstance(table, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) and name.strip() for name in names)
        for names in table.values()
    )
    if not fits or not table:
        raise ValueError(
            f'entity_table={source!r} must be a JSON object of types with lists of names, as {{"city": ["Rome"]}}'
        )
    return {kind: [name.strip() for name in names] for kind, names in table.items()}


def python_names() -> dict[str, list[str]]:
    """Names that Python's documentation is full of: modules, exceptions, functions and types."""
    found: dict[str, list[str]] = {"module": [], "exception": [], "function": [], "type": []}
    for name in sorted(vars(builtins)):
        value = getattr(builtins, name)
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            found["exception" if issubclass(value, BaseException) else "type"].append(name)
        elif type(value).__name__ == "builtin_function_or_method":
            found["function"].append(name)
    found["module"] = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    return found
