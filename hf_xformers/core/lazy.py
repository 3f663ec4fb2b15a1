# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: str, names: Mapping[str, str], former: Mapping[str, tuple[str, str]] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a package. names: public name -> module of the package that defines it; type checkers read
    them from a stub (scripts/make_stubs.py). former: name that a later version does not have -> what it is called now,
    and that version; whoever uses it is told so once, by a FutureWarning."""

    def find(name: str) -> Any:
        if former is not None and name in former:
            instead, version = former[name]
            warnings.warn(
                f"`{package}.{name}` goes in version {version}; write `{package}.{instead}`.",
                FutureWarning,
                stacklevel=2,
            )
            name = instead
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


__all__ = ["lazily"]
