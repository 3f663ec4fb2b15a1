"""Imports the files of a room (a folder of components), which register themselves under their names."""

from __future__ import annotations

import importlib
import pkgutil


def import_room(room: str, module: str | None = None) -> None:
    """Imports every file of the package's folder `room`, or only the file `module`, if there is one."""
    package = importlib.import_module(f"hf_xformers.{room}")
    for info in pkgutil.iter_modules(package.__path__):
        if module is None or info.name == module:
            importlib.import_module(f"hf_xformers.{room}.{info.name}")
