"""Comparing variants: time, peak memory and quality beside dense attention, in fresh processes.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Comparison": "runner",
    "Settings": "runner",
    "Entry": "entries",
    "interleaved_seconds": "measure",
    "memory_in_fresh_process": "measure",
    "peak_growth": "measure",
    "ratios": "measure",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
