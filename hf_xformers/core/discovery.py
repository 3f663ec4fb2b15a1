# SPDX-License-Identifier: Apache-2.0
"""Imports the files of a component package (a "room" in identifiers), which register themselves under their names."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import pkgutil

PLUGINS = "hf_xformers.components"  # entry-point group of packages whose modules register components
IMPORTED = "HF_XFORMERS_IMPORT"  # environment variable: further such modules, with commas between them


def import_room(room: str, module: str | None = None) -> None:
    """Imports every file of the package's folder `room`, or only the file `module`, if there is one."""
    package = importlib.import_module(f"hf_xformers.{room}")
    for info in pkgutil.iter_modules(package.__path__):
        if module is None or info.name == module:
            importlib.import_module(f"hf_xformers.{room}.{info.name}")


def import_plugins() -> None:
    """Imports the modules that other packages name under [`PLUGINS`], and those of [`IMPORTED`]: once, and the first
    time that a name is not found in these packages.

    Raises ValueError for one that cannot be imported.
    """
    _import_all(os.environ.get(IMPORTED, ""))


@functools.lru_cache(maxsize=1)
def _import_all(named: str) -> None:
    entries = importlib.metadata.entry_points(group=PLUGINS)
    modules = {entry.value: f"the package that names it under {PLUGINS}" for entry in entries}
    modules |= dict.fromkeys(filter(None, named.split(",")), f"the module, --import or {IMPORTED}")
    for name, remedy in modules.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"The module {name!r} of components cannot be imported ({error}); correct {remedy}."
            ) from None
