# Written by scripts/make_stubs.py.
from .entries import Entry as Entry
from .measure import interleaved_seconds as interleaved_seconds
from .measure import memory_in_fresh_process as memory_in_fresh_process
from .measure import peak_growth as peak_growth
from .measure import ratios as ratios
from .runner import Comparison as Comparison
from .runner import Settings as Settings

__all__ = [
    "Comparison",
    "Entry",
    "Settings",
    "interleaved_seconds",
    "memory_in_fresh_process",
    "peak_growth",
    "ratios",
]
