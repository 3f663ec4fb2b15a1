"""What the benchmarks of this folder share: the package's own measuring code, and the folder `results/`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hf_xformers.benchmark import tables
from hf_xformers.benchmark.measure import (  # noqa: F401  (for the scripts next to this one)
    forked_memory,
    interleaved_seconds,
    machine,
    memory_in_fresh_process,
    peak_growth,
    ratios,
)
from hf_xformers.benchmark.measure import process_status as _status  # noqa: F401


def write_results(
    name: str, rows: list[dict[str, Any]], columns: list[str], title: str, note: str, **further: Any
) -> Path:
    """Writes `results/<name>.json`, with what is `further`, and `results/<name>.md` next to this file."""
    folder = Path(__file__).parent / "results"
    return tables.write_results(folder, name, machine(), rows, columns, title, note, further)


if os.environ.get("OMP_NUM_THREADS") is None:
    torch.set_num_threads(1)
