# SPDX-License-Identifier: Apache-2.0
"""Comparing variants: time, peak memory and quality compared with dense attention, in fresh processes.

Names are imported when they are first used.
"""

from __future__ import annotations

from ..core.lazy import lazily

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
__getattr__ = lazily(__name__, _NAMES)
